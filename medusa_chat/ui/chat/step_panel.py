"""The panel beside the conversation as data: figures, bars, one step's picture. No gradio."""

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from medusa_chat.decoding.events import Step
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.page.status import named
from medusa_chat.ui.page.tree_view import short, step_view, to_line

LIVE_BARS = 240  # of an answer that runs, for who comes in the middle of it
MOST_BARS = 900  # of one that is looked at: sent on a click
SHOWN_AT_ONCE = 24  # steps with their trees, about 6 KB each
LOW_RATE = 1.6  # tokens per step; below it the heads guess too seldom to pay
NOISE = 0.1  # share of plain decoding's speed by which two measurements of one speed may differ
MANY_NODES = 8  # of a step; with fewer, fewer still would not help
CHEAPER = " Fewer nodes cost less; at full speed their number is automatic."
SPLIT = ("backbone", "heads", "rest")


def figures(answer: Answer, plain: float | None) -> dict[str, Any]:
    """The numbers beside the picture. plain: tokens per second of plain decoding, measured
    on this model. split_ms: mean per step of SPLIT, which adds up to ms; null without a record.
    is_noise: whether an overhead below 1 was measured, which is shown as 1. loop: see Answer."""
    first, counted = answer.prefilled, answer.counted
    used = first.prompt_tokens + len(first.token_ids) + answer.tokens if first else None
    ms = counted.seconds / counted.steps * 1000 if counted.steps else None
    overhead = None if answer.is_plain else answer.overhead(plain)
    return {
        "rate": short(answer.rate),
        "recent": short(recent_rate(answer)),
        "per_step": short(counted.per_step),
        "ms": short(ms),
        "split_ms": split_ms(answer),
        "steps": len(answer.steps),
        "used": used,
        "context": first.context or None if first else None,
        "plain": short(plain),
        "ratio": None if answer.is_plain else short(answer.speedup(plain)),
        "overhead": short(overhead and max(1.0, overhead)),
        "is_noise": bool(overhead and overhead < 1),
        "slower": verdict(answer, plain),
        "loop": answer.loop,
        "is_plain": answer.is_plain,
        "prefill_ms": short(first.seconds * 1000 if first else None),
        "prompt": first.prompt_tokens if first else None,
        "reused": first.reused_tokens if first else None,
        "first_ms": short(_first_ms(answer)),
    }


def most_telling(steps: Sequence[Step]) -> int | None:
    """The step that shows most of drafting: the most tokens accepted, then the most nodes; the last
    one, which the end of the text may have cut, only where there is no other. None without any."""
    if not steps:
        return None
    among = range(max(1, len(steps) - 1))
    return max(among, key=lambda place: (len(steps[place].path), steps[place].nodes))


def recent_rate(answer: Answer) -> float | None:
    """Tokens per second over the last second of decoding, or all of it where it is shorter."""
    tokens, seconds = 0, 0.0
    for step in reversed(answer.steps):
        tokens, seconds = tokens + len(step.token_ids), seconds + step.seconds
        if seconds > 0.999:  # sums of floats
            break
    return tokens / seconds if seconds > 0 else None


def split_ms(answer: Answer) -> list[float] | None:
    """Milliseconds per step of SPLIT; the parts add up to the mean step."""
    of = answer.counted
    if not of.steps or not of.backbone_seconds:
        return None
    rest = max(0.0, of.seconds - of.backbone_seconds - of.heads_seconds)
    parts = (of.backbone_seconds, of.heads_seconds, rest)
    return [short(part / of.steps * 1000) for part in parts]


def verdict(answer: Answer, plain: float | None) -> str:
    """Why Medusa loses to plain decoding here, in a sentence; empty where it does not by more than
    measurements differ.

    speedup = tokens per step / overhead, and overhead = ms per step / ms per plain step.
    """
    rate, per_step, overhead = answer.rate, answer.counted.per_step, answer.overhead(plain)
    if not plain or not rate or not per_step or not overhead or answer.is_plain:
        return ""
    if rate >= (1 - NOISE) * plain:
        return ""
    low = f"low acceptance, {per_step:.2f} tokens per step"
    dear = f"the tree's overhead, a step costs {overhead:.2f} plain ones"
    advice = CHEAPER if max(s.nodes for s in answer.steps) > MANY_NODES else ""
    if per_step >= LOW_RATE:
        return f"Slower than plain decoding here: {dear}.{advice}"
    if overhead <= LOW_RATE:
        return f"Slower than plain decoding here: {low}."
    return f"Slower than plain decoding here: {low}, and {dear}.{advice}"


def panel_line(
    answer: Answer,
    plain: float | None,
    index: int | None = None,
    since: int = 0,
    is_newest: bool = True,
    is_watched: bool = False,
) -> str:
    """JSON for the picture: figures, bars, and step `index` (None: the latest). since: of how
    many steps the reader has the bars. is_newest: whether it is the conversation's last answer.
    is_watched: whether another program asked for it."""
    begun = answer.prefilled
    settings = begun.settings if begun else {}
    count = len(answer.steps)  # once: they are folded by another thread meanwhile
    is_pinned = index is not None and index < count
    place = index if is_pinned and index is not None else count - 1
    first, shown = bars_around(answer, place, is_pinned, since)
    step = answer.steps[place] if count else None
    return to_line(
        {
            "answer": answer.number,
            "newest": is_newest,
            "watched": is_watched,
            "goes_on": _goes_on(answer),
            "model": named(begun.model, begun.backbone) if begun else "",
            "pinned": is_pinned,
            "ended": answer.finished is not None,
            "drafter": settings.get("drafter"),
            "temperature": settings.get("temperature"),
            "epsilon": settings.get("posterior_threshold"),
            "delta": settings.get("posterior_alpha"),
            "figures": figures(answer, plain),
            "first": first,
            **_places(answer, first, shown),
            "bars": [len(step.token_ids) for step in shown],
            "times": [short(step.seconds * 1000, 3) for step in shown],
            "nodes": [step.nodes for step in shown],
            "step": _view(answer, step, place) if step else None,
        }
    )


def replay_line(answer: Answer, plain: float | None) -> dict[str, Any]:
    """All that the panel shows of an answer that is over: `line` as of panel_line, with every bar
    and its most telling step, and `steps`, the picture of each."""
    place = most_telling(answer.steps)
    line = json.loads(panel_line(answer, plain, place))
    steps = list(answer.steps)
    bars = {
        "first": 0,
        **_places(answer, 0, steps),
        "bars": [len(step.token_ids) for step in steps],
        "times": [short(step.seconds * 1000, 3) for step in steps],
        "nodes": [step.nodes for step in steps],
    }
    return {
        "line": line | bars,
        "steps": [_view(answer, step, place) for place, step in enumerate(steps)],
    }


def _goes_on(answer: Answer) -> bool:
    """Whether it has more text than was recorded of it: it goes on from an answer before."""
    recorded = sum(len(step.text) for step in (answer.prefilled, *answer.steps) if step)
    tail = answer.finished.tail if answer.finished else ""
    return answer.prefilled is not None and len(answer.text) > recorded + len(tail)


def bars_around(
    answer: Answer, place: int, is_pinned: bool, since: int = 0
) -> tuple[int, list[Step]]:
    """The steps whose bars are sent, and the index of the first: the last ones while the answer
    runs, a wider window around `place` when it is looked at. The browser keeps what it got."""
    most = MOST_BARS if is_pinned or answer.finished else LIVE_BARS
    first = max(0, len(answer.steps) - most, since)
    if is_pinned:
        first = max(0, min(first, place - most // 2))
    return first, list(islice(answer.steps, first, first + most))


def _places(answer: Answer, first: int, shown: list[Step]) -> dict[str, Any]:
    """Where in the answer's text the text of step `first` begins, and how long the text of each
    shown step is, in the UTF-16 units in which a browser counts."""
    tail = answer.finished.tail if answer.finished else ""
    after = sum(_units(step.text) for step in islice(answer.steps, first, None))
    lengths = [_units(step.text) for step in shown]
    return {"at": max(0, _units(answer.text) - after - _units(tail)), "lengths": lengths}


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def show_line(answer: Answer, since: int) -> tuple[str, int]:
    """(JSON of the next steps from `since` on, at most SHOWN_AT_ONCE, for the browser to show one
    after the other; how many it then has). Empty before there is any text. begin: pieces of text
    before the first step; thought: reasoning before it."""
    if (first := answer.prefilled) is None:
        return "", since
    steps = list(islice(answer.steps, since, since + SHOWN_AT_ONCE))
    known = since + len(steps)
    is_over = answer.finished is not None and known == len(answer.steps)
    begin = (*answer.before, (first.text, 1))
    line = {
        "answer": answer.number,
        "since": since,
        "begin": [] if since else [part for text, count in begin for part in (count, text)],
        "thought": "" if since else answer.thought + first.reasoning,
        "steps": [
            [s.text, _view(answer, s, since + place), s.reasoning] for place, s in enumerate(steps)
        ],
        "ended": is_over,
        "tail": answer.finished.tail if is_over and answer.finished else "",
    }
    return to_line(line), known


def _view(answer: Answer, step: Step, place: int) -> dict[str, Any]:
    """The step, with how many tokens stand before its root: the keys every node sees."""
    prefilled = answer.prefilled
    if prefilled is None:
        return step_view(step)
    view = step_view(step, prefilled.settings.get("posterior_threshold"))
    after = sum(len(later.token_ids) for later in islice(answer.steps, place, None))
    said = len(prefilled.token_ids) + answer.tokens - after
    return view | {"prefix": prefilled.prompt_tokens + said - 1}


def _first_ms(answer: Answer) -> float | None:
    """Milliseconds from asking to the first token; prefill alone where the asking is not known."""
    if answer.first_seconds is not None:
        return answer.first_seconds * 1000
    return answer.prefilled.seconds * 1000 if answer.prefilled else None
