"""A comparison as data for the Compare tab: progress, recordings, figures, sentences. No gradio."""

import math
from typing import Any

from medusa_chat.runtime.compare import PLAIN_STEPS, Comparison, Difference, Progress, Recording
from medusa_chat.ui.page.status import without_folders
from medusa_chat.ui.page.tree_view import printable, short

NAMES = {
    "none": "Plain",
    "auto": "Medusa and prompt lookup",
    "medusa": "Medusa",
    "prompt-lookup": "Prompt lookup",
}
MUCH = 0.1  # of the time, for other programs
NEAR_TIE = 0.01  # log probability: closer than half precision tells apart
ENDS = {
    "eos": "ended by itself",
    "length": "limit of new tokens",
    "context": "context full",
    "stop": "stop text",
}


def progress_view(progress: Progress, limit: int, wait: str) -> dict[str, Any]:
    """What runs now. limit: tokens at most. wait: why nothing runs yet; empty when it does."""
    name = "plain" if progress.side == "plain" else "with the drafter"
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
        "stage": progress.stage,
        "side": progress.side,
        "place": progress.place,
        "tokens": progress.tokens,
        "limit": limit,
        "rate": short(rate),
    }


def result_view(found: Comparison) -> dict[str, Any]:
    """Everything the replay and the table show."""
    one, two = found.plain, found.drafted
    return {
        "sides": [_side(one, "plain"), _side(two, "drafted")],
        "verdict": verdict(found),
        "hedge": hedge(found),
        "whose": "demo" if found.model == "demo" else "model",
        "is_slower": bool(found.speedup and found.speedup < 1),
        "speedup": _ratio(found.speedup),
        "acceleration_rate": _ratio(found.acceleration_rate),
        "overhead": _ratio(found.overhead),
        "wall_clock_ratio": _ratio(found.wall_clock_ratio),
        "total_ratio": _ratio(found.total_ratio),
        "is_same_length": len(one.token_ids) == len(two.token_ids),
        "baseline": found.baseline,
        "how": how(found),
        "identical": found.difference is None,
        "tokens": len(one.token_ids),
        "difference": difference_view(found),
    }


def verdict(found: Comparison) -> str:
    """The comparison in one sentence or two; plain when the drafter does not pay."""
    name, speedup = _name(found.drafted), found.speedup
    if speedup is None:
        return "The answers are too short to compare: give more tokens."
    if speedup >= 1:
        return f"{name} is {_ratio(speedup):.2f}× as fast as plain decoding.{hedge(found)}"
    return (
        f"{name} is slower than plain decoding here: {_ratio(speedup):.2f}×. A step costs "
        f"{_ratio(found.overhead):.2f} plain steps and gives "
        f"{_ratio(found.acceleration_rate):.2f} tokens.{hedge(found)}"
    )


def hedge(found: Comparison) -> str:
    """A sentence more where an answer has few steps; empty otherwise."""
    few = min(found.plain.stats.steps, found.drafted.stats.steps) < PLAIN_STEPS
    return " The answers are short: take it as a hint." if few else ""


def how(found: Comparison) -> str:
    """What was run: model, settings, order, what the figures leave out."""
    settings = found.settings
    tree = "" if _is_lookup(found) else f", tree {settings['tree']} with {settings['nodes']} nodes"
    test = f" (ε {settings['posterior_threshold']:g}, δ {settings['posterior_alpha']:g})"
    order = "plain first" if found.is_plain_first else "plain second"
    return (
        f"{without_folders(found.model)}, {found.precision}, {found.device}. "
        f"{settings['acceptance']} acceptance{test if found.is_lossy else ''}, "
        f"temperature {settings['temperature']:g}, seed {settings['seed']}{tree}. "
        f"{len(found.prompt_token_ids):,} prompt tokens. "
        f"One after the other, {order}, each from an empty cache after a warm-up that no figure "
        f"counts.{others(found)}"
    )


def others(found: Comparison) -> str:
    """A sentence more where other programs took much of the time; empty otherwise."""
    sides = (found.plain.stats, found.drafted.stats)
    taken = max(1 - (s.busy_seconds or s.seconds) / s.seconds if s.seconds else 0 for s in sides)
    if taken < MUCH:
        return ""
    return (
        f" Other programs took {taken:.0%} of the time: the speedup and the ms per step leave it "
        "out, the race, the tokens/s and the ratios by the clock do not."
    )


def difference_view(found: Comparison) -> dict[str, Any] | None:
    """The first difference with what it means; None when there is none."""
    parts = found.difference
    if parts is None:
        return None
    return {
        "index": parts.index,
        "tokens": [printable(parts.plain), printable(parts.drafted)],
        "raw": [parts.plain, parts.drafted],
        "gap": gap_text(parts),
        "note": difference_note(found),
    }


def gap_text(parts: Difference) -> str:
    """How far apart the two tokens are for the backbone; empty when it is not known."""
    if parts.gap is None or not math.isfinite(parts.gap):
        return ""
    gap = abs(parts.gap)
    return f"{f'{gap:.4f}' if gap >= 0.0001 else 'under 0.0001'} in log probability"


def difference_note(found: Comparison) -> str:
    """Whether this difference is to be expected."""
    parts = found.difference
    if found.is_lossy:
        return f"{found.settings['acceptance']} is lossy: a difference is expected."
    if parts and parts.gap is not None and abs(parts.gap) < NEAR_TIE:
        return f"A near tie: {found.precision} rounds a tree pass and a one-row pass differently."
    if found.precision in ("fp32", "fp64"):
        return f"{found.settings['acceptance']} in {found.precision} should give the same text."
    return (
        f"{found.precision} rounds a tree pass and a one-row pass differently: where two tokens "
        "are nearly equal, either may win."
    )


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


def _is_lookup(found: Comparison) -> bool:
    return found.drafted.drafter == "prompt-lookup"


def _ratio(value: float | None) -> float | None:
    """Rounded here, once: the sentence and the figures must not round a tie differently."""
    return None if value is None or not math.isfinite(value) else round(value, 2)
