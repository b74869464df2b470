"""A comparison as data for the Compare tab: progress, recordings, figures, sentences. No gradio."""

import math
from collections.abc import Sequence
from typing import Any

from medusa_chat.decoding.drafters import kinds
from medusa_chat.runtime.compare import PLAIN_STEPS, Comparison, Difference, Progress, Recording
from medusa_chat.ui.page.status import without_folders
from medusa_chat.ui.page.tree_view import printable, short
from medusa_chat.units import duration

NAMES = {
    **{kind.name: kind.label for kind in kinds.KINDS},
    "none": "Plain",
    "auto": "Drafting and prompt lookup",
}
MUCH = 0.1  # of the time, for other programs
TOO_SHORT = "The answers are too short to compare: give more tokens."
NEAR_TIE = 0.01  # log probability: closer than half precision tells apart
ENDS = {
    "eos": "ended by itself",
    "length": "limit of new tokens",
    "context": "context full",
    "stop": "stop string",
}


def lane_names(against: str, drafter: str | None) -> list[str]:
    """What the two sides are called while they run."""
    if against == kinds.NONE.name:
        return ["Plain", "With the drafter"]
    return [NAMES[against], NAMES[drafter or kinds.AUTO]]


def progress_view(
    progress: Progress,
    limit: int,
    wait: str,
    names: Sequence[str] = ("Plain", "With the drafter"),
) -> dict[str, Any]:
    """What runs now. limit: tokens at most. wait: why nothing runs yet; empty when it does. names:
    of the sides."""
    name = names[progress.side != "plain"]
    name = name.lower() if names[0] == "Plain" else f"with {name}"
    where = f"{name} ({progress.place} of 2)"
    spoken = ""
    if progress.stage == "waiting":
        status = wait
        spoken = wait if progress.ahead else ""
    elif progress.stage == "warming up":
        status = f"warming up {where}: not counted …"
    else:
        status = spoken = f"running {where} …"
    rate = progress.tokens / progress.seconds if progress.seconds else None
    return {
        "state": "running",
        "status": status,
        "spoken": spoken,  # for screen readers: only what lasts
        "names": list(names),
        "stage": progress.stage,
        "side": progress.side,
        "place": progress.place,
        "tokens": progress.tokens,
        "limit": limit,
        "rate": short(rate),
    }


def result_view(comparison: Comparison) -> dict[str, Any]:
    """Everything the replay and the table show."""
    one, two, headline = comparison.plain, comparison.drafted, _headline(comparison)
    return {
        "sides": [_side(one, "plain"), _side(two, "drafted")],
        "verdict": verdict(comparison),
        "hedge": hedge(comparison),
        "whose": "demo" if comparison.model == "demo" else "model",
        "is_slower": bool(headline and headline < 1),
        "is_race": comparison.is_race,
        "speedup": _ratio(comparison.speedup),
        "acceleration_rate": _ratio(comparison.relative_rate),
        "overhead": _ratio(comparison.overhead),
        "is_noise": comparison.is_noise,
        "wall_clock_ratio": _ratio(comparison.wall_clock_ratio),
        "total_ratio": _ratio(comparison.total_ratio),
        "baseline": comparison.baseline,
        "base": base_name(comparison),
        "how": how(comparison),
        "identical": comparison.difference is None,
        "tokens": len(one.token_ids),
        "difference": difference_view(comparison),
    }


def base_name(comparison: Comparison) -> str:
    """What the drafted side is measured against, within a sentence."""
    return "plain decoding" if comparison.is_against_plain else _name(comparison.plain)


def verdict(comparison: Comparison) -> str:
    """The comparison in a few sentences, which follow from the race that is shown; plain when the
    drafter does not pay."""
    base = base_name(comparison)
    name, ratio = _name(comparison.drafted), _ratio(_headline(comparison))
    if ratio is None:
        return TOO_SHORT
    if ratio >= 1:
        said = f"{name} is {ratio:.2f}× as fast as {base}{_of_what(comparison)}."
    elif not comparison.is_against_plain:
        said = f"{name} is slower than {base} here: {ratio:.2f}×{_of_what(comparison)}."
    else:
        overhead = _ratio(max(1.0, comparison.overhead or 1.0))
        said = (
            f"{name} is slower than plain decoding here: {ratio:.2f}×{_of_what(comparison)}. "
            f"A step costs {overhead:.2f} plain steps and gives "
            f"{_ratio(comparison.acceleration_rate):.2f} tokens."
        )
    return f"{said}{_beside(comparison)}{hedge(comparison)}"


def _headline(comparison: Comparison) -> float | None:
    """The ratio that the verdict goes by: of the times of the race, or per token where these do not
    compare like with like. None without steps."""
    if comparison.speedup is None:
        return None
    return comparison.total_ratio if comparison.is_race else comparison.speedup


def _of_what(comparison: Comparison) -> str:
    if comparison.is_race:
        times = (side.total_seconds for side in (comparison.drafted, comparison.plain))
        return f": {' against '.join(map(duration, times))}"
    if comparison.loop is None:
        return ", per token, for the answers differ in length"
    return f", per token, until the text repeats itself from token {comparison.loop + 1} on"


def _beside(comparison: Comparison) -> str:
    """What the times of the race have beside the steps, where that is much of their ratio."""
    total, steps = comparison.total_ratio, comparison.speedup
    if not comparison.is_race or not total or not steps or abs(total / steps - 1) < MUCH:
        return ""
    alone = f" The steps alone: {_ratio(steps):.2f}×; "
    if others(comparison):
        return f"{alone}the rest is time that other programs took."
    firsts = (comparison.drafted.stats, comparison.plain.stats)
    times = " against ".join(duration(stats.prefill_seconds) for stats in firsts)
    return f"{alone}the rest is the time to the first token, {times}, which no drafter changes."


def hedge(comparison: Comparison) -> str:
    """A caveat where an answer has few steps; empty otherwise."""
    few = min(comparison.plain.counted.steps, comparison.drafted.counted.steps) < PLAIN_STEPS
    return " The answers are short, so this is only a rough figure." if few else ""


def how(comparison: Comparison) -> str:
    """What was run: model, settings, order, what the figures leave out."""
    settings = comparison.settings
    tree = f", tree {settings['tree']} with {settings['nodes']} nodes"
    tree = "" if _is_lookup(comparison) else tree
    test = f" (ε {settings['posterior_threshold']:g}, δ {settings['posterior_alpha']:g})"
    name = "plain" if comparison.is_against_plain else _name(comparison.plain)
    order = f"{name} first" if comparison.is_plain_first else f"{name} second"
    return (
        f"{without_folders(comparison.model)}, {comparison.precision}, {comparison.device}. "
        f"{settings['acceptance']} acceptance{test if comparison.is_lossy else ''}, "
        f"temperature {settings['temperature']:g}, seed {settings['seed']}{tree}. "
        f"{len(comparison.prompt_token_ids):,} prompt tokens. "
        f"Run one after the other, {order}, each from an empty cache after an untimed warm-up."
        f"{others(comparison)}"
    )


def others(comparison: Comparison) -> str:
    """A caveat where other programs took much of the time; empty otherwise."""
    sides = (comparison.plain.stats, comparison.drafted.stats)
    taken = max(1 - (s.busy_seconds or s.seconds) / s.seconds if s.seconds else 0 for s in sides)
    if taken < MUCH:
        return ""
    return (
        f" Other programs took {taken:.0%} of the time: the speedup and the ms per step exclude "
        "it; the race, the tokens/s and the wall-clock ratios include it."
    )


def difference_view(comparison: Comparison) -> dict[str, Any] | None:
    """The first difference with what it means; None when there is none."""
    parts = comparison.difference
    if parts is None:
        return None
    return {
        "index": parts.index,
        "tokens": [printable(parts.plain), printable(parts.drafted)],
        "raw": [parts.plain, parts.drafted],
        "gap": gap_text(parts),
        "note": difference_note(comparison),
    }


def gap_text(parts: Difference) -> str:
    """How far apart the two tokens are for the backbone; empty when it is not known."""
    if parts.gap is None or not math.isfinite(parts.gap):
        return ""
    gap = abs(parts.gap)
    return f"{f'{gap:.4f}' if gap >= 0.0001 else 'under 0.0001'} in log probability"


def difference_note(comparison: Comparison) -> str:
    """Whether this difference is to be expected."""
    difference, precision = comparison.difference, comparison.precision
    acceptance = comparison.settings["acceptance"]
    rounds = f"{precision} rounds a tree pass and a one-row pass differently"
    if comparison.is_lossy:
        return f"{acceptance} is lossy: a difference is expected."
    if difference and difference.gap is not None and abs(difference.gap) < NEAR_TIE:
        return f"A near tie: {rounds}."
    if precision in ("fp32", "fp64"):
        return f"{acceptance} in {precision} should give the same text."
    return f"{rounds}: where two tokens are nearly equal, either may win."


def _side(side: Recording, key: str) -> dict[str, Any]:
    step_seconds = side.stats.step_seconds
    return {
        "key": key,
        "name": _name(side),
        "frames": [[round(f.seconds * 1000, 2), f.text, f.tokens, f.nodes] for f in side.frames],
        "rate": short(side.stats.tokens_per_second),
        "first_ms": short(side.stats.prefill_seconds * 1000),
        "total_ms": round(side.total_seconds * 1000, 2),
        "tokens": len(side.token_ids),
        "steps": side.stats.steps,
        "per_step": short(side.stats.acceleration_rate),
        "step_ms": short(None if step_seconds is None else step_seconds * 1000),
        "end": ENDS.get(side.reason, side.reason),
    }


def _name(side: Recording) -> str:
    return NAMES.get(side.drafter, side.drafter)


def _is_lookup(comparison: Comparison) -> bool:
    return comparison.drafted.drafter == "prompt-lookup"


def _ratio(value: float | None) -> float | None:
    """Rounded here, once: the sentence and the figures must not round a tie differently."""
    return None if value is None or not math.isfinite(value) else round(value, 2)
