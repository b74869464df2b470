"""The picture of a step as data: Step -> plain values, small enough to send 15 times a second."""

import json
import math
from collections.abc import Sequence
from typing import Any

from medusa_chat.decoding.events import DraftRecord, Step

MAX_TEXT = 24
MAX_MARGIN = 99.0
MARKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def step_view(step: Step) -> dict[str, Any]:
    """One step, a list entry per node, the root first.

    state: a letter per node, a(ccepted), r(ejected: its parent was accepted, it was not),
    u(nreached). margin: log(p / threshold) under typical acceptance. same: whether the node is
    the backbone's own token at its parent, under exact. rank counts from 1. Figures that do not
    exist are null; without a draft record only the numbers of the step are there.
    """
    view: dict[str, Any] = {
        "index": step.index,
        "tokens": len(step.token_ids),
        "accepted": len(step.path) - 1,
        "ms": _short(step.seconds * 1000),
        "heads_ms": _short(step.heads_seconds * 1000),
    }
    if step.draft is not None:
        view |= _nodes(step.draft, step.path)
    return view


def _nodes(draft: DraftRecord, path: Sequence[int]) -> dict[str, Any]:
    above = (None, *draft.parents[1:])  # the parent of each node, None for the root
    return {
        "parent": list(draft.parents),
        "id": list(draft.tokens),
        "text": texts_of(draft),
        "state": states(draft.parents, path),
        "rank": [None if rank is None else rank + 1 for rank in draft.ranks],
        "q": [_short(q) for q in draft.draft_probabilities],
        "p": [_short(p) for p in draft.probabilities],
        "entropy": [_short(h) for h in draft.entropies],
        "threshold": [_short(t) for t in draft.thresholds],
        "margin": [
            None if at is None else margin(draft.probabilities[node], draft.thresholds[at])
            for node, at in enumerate(above)
        ],
        "same": [
            None
            if at is None or draft.sampled[at] is None
            # 1 and 0 are shorter than true and false
            else int(draft.tokens[node] == draft.sampled[at])
            for node, at in enumerate(above)
        ],
        "sampled": list(draft.sampled),
    }


def states(parents: Sequence[int], path: Sequence[int]) -> str:
    """A letter per node: a, r or u."""
    taken = set(path)
    return "".join(
        "a" if node in taken else "r" if parent in taken else "u"
        for node, parent in enumerate(parents)
    )


def margin(probability: float | None, threshold: float | None) -> float | None:
    """log(p / threshold), within +-99; positive passes. None where there is no test."""
    if probability is None or threshold is None:
        return None
    if probability <= 0 or threshold <= 0:
        return -MAX_MARGIN if probability <= 0 else MAX_MARGIN
    value = math.log(probability) - math.log(threshold)
    return round(max(-MAX_MARGIN, min(MAX_MARGIN, value)), 2)


def texts_of(draft: DraftRecord) -> list[str]:
    """Printable token texts; the ids where the worker sent no texts."""
    texts = getattr(draft, "texts", ())
    if len(texts) != len(draft.tokens):
        return [str(token) for token in draft.tokens]
    return [printable(text) for text in texts]


def printable(text: str) -> str:
    """One line that shows what a token really is: spaces, line ends and unprintables marked."""
    shown = "".join(map(_mark, text[:MAX_TEXT]))
    if len(shown) > MAX_TEXT or len(text) > MAX_TEXT:
        shown = shown[: MAX_TEXT - 1] + "…"
    return shown or "∅"


def _mark(character: str) -> str:
    if character in MARKS:
        return MARKS[character]
    return character if character.isprintable() else f"<{ord(character):02X}>"


def _short(value: float | None) -> float | None:
    """Three significant digits; a figure that is not finite is none."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.3g}")


def to_line(value: object) -> str:
    """Compact JSON. "<" is escaped: the text stays inert wherever it might be put."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
