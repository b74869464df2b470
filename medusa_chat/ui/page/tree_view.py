"""The picture of a step as data: Step -> plain values, small enough to send 15 times a second."""

import json
import math
import unicodedata
from collections.abc import Sequence
from typing import Any

from medusa_chat.decoding.events import DraftRecord, Source, Step

MAX_TEXT = 24
MAX_MARGIN = 99.0
LETTERS: dict[Source | None, str] = {  # of assets/js/words.js
    None: "-",
    "heads": "h",
    "draft": "d",
    "text": "t",
    "both": "b",
    "draft and text": "e",
    "first draft": "f",
    "second draft": "s",
    "both drafts": "m",
    "first draft and text": "F",
    "second draft and text": "S",
    "both drafts and text": "M",
}
MARKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
JOINERS = "\u200c\u200d"  # inside a word or an emoji they are part of what one sees
FLAGS = range(0x1F1E6, 0x1F200)
SKINS = range(0x1F3FB, 0x1F400)


def step_view(step: Step, epsilon: float | None = None) -> dict[str, Any]:
    """One step, a list entry per node, the root first.

    state: a letter per node, a(ccepted), r(ejected: its parent was accepted, it was not),
    u(nreached), e(nd: the answer ended above it). margin: log(p / threshold) under typical
    acceptance; binds: a letter per node as a parent, see `binding`. same: whether the node is the
    backbone's own token at its parent, under exact. rank counts from 1. source: a letter of LETTERS
    per node, where the record says so. next: the text of the token
    that the backbone put behind the path, "" where it put none. Figures that do not exist
    are null, and so is a list of them; without a draft record only the numbers of the step are
    there.
    """
    view: dict[str, Any] = {
        "index": step.index,
        "tokens": len(step.token_ids),
        "nodes": step.nodes,
        "accepted": len(step.path) - 1,
        "ms": short(step.seconds * 1000, 3),
        "heads_ms": short(step.heads_seconds * 1000, 3),
        "backbone_ms": short(step.backbone_seconds * 1000, 3),
    }
    if step.draft is not None:
        view |= _nodes(step.draft, step.path, len(step.token_ids) < len(step.path), epsilon)
    return view


def _nodes(
    draft: DraftRecord, path: Sequence[int], is_end: bool, epsilon: float | None
) -> dict[str, Any]:
    binds = "".join(binding(threshold, epsilon) for threshold in draft.thresholds)
    above = (None, *draft.parents[1:])  # the parent of each node, None for the root
    return {
        "parent": list(draft.parents),
        "id": list(draft.tokens),
        "text": [printable(text) for text in draft.texts],
        "next": draft.next_text and printable(draft.next_text),
        "state": states(draft.parents, path, is_end),
        "source": "".join(LETTERS[source] for source in draft.sources) or None,
        "rank": _some([None if rank is None else rank + 1 for rank in draft.ranks]),
        "q": _some([short(q, 3) for q in draft.draft_probabilities]),
        "p": _some([short(p, 3) for p in draft.probabilities]),
        "entropy": _some([short(h, 3) for h in draft.entropies]),
        "threshold": _some([short(t, 3) for t in draft.thresholds]),
        "binds": binds if set(binds) - {"-"} else None,
        "margin": _some(
            [
                None if at is None else margin(draft.probabilities[node], draft.thresholds[at])
                for node, at in enumerate(above)
            ]
        ),
        "same": _some(
            [
                None
                if at is None or draft.sampled[at] is None
                # 1 and 0 are shorter than true and false
                else int(draft.tokens[node] == draft.sampled[at])
                for node, at in enumerate(above)
            ]
        ),
        "sampled": _some(list(draft.sampled)),
    }


def _some(values: list[Any]) -> list[Any] | None:
    return values if any(value is not None for value in values) else None


def states(parents: Sequence[int], path: Sequence[int], is_end: bool = False) -> str:
    """A letter per node: a, r, u or e. is_end: the answer ended with the path, with no token
    behind it: nothing is said of what follows there."""
    taken, last = set(path), path[-1] if is_end else None
    return "".join(
        "a" if node in taken else "e" if parent == last else "r" if parent in taken else "u"
        for node, parent in enumerate(parents)
    )


def margin(probability: float | None, threshold: float | None) -> float | None:
    """log(p / threshold), within +-99; positive passes. None where there is no test, or where
    everything (a threshold of 0) or nothing (a probability of 0) would pass."""
    if not probability or not threshold or probability < 0 or threshold < 0:
        return None
    value = math.log(probability) - math.log(threshold)
    return round(max(-MAX_MARGIN, min(MAX_MARGIN, value)), 2)


def binding(threshold: float | None, epsilon: float | None) -> str:
    """Which side of min(epsilon, delta * exp(-H)) a recorded threshold is: e(psilon), d(elta), or
    "-" where there is no test. The record is float32, so equal means up to its rounding."""
    if threshold is None or epsilon is None:
        return "-"
    return "e" if threshold >= epsilon * (1 - 1e-6) else "d"


def printable(text: str) -> str:
    """One line that shows what a token really is: spaces, line ends and unprintables marked."""
    shown = "".join(_mark(text, place) for place in range(min(len(text), 2 * MAX_TEXT)))
    if unicodedata.category(shown[:1] or "-").startswith("M"):
        shown = "◌" + shown  # a mark that stands on the character before it
    if len(shown) > MAX_TEXT:
        shown = shown[: _cut(shown, MAX_TEXT - 1)] + "…"
    return shown or "∅"


def _mark(text: str, place: int) -> str:
    character = text[place]
    if character in MARKS:
        return MARKS[character]
    if character in JOINERS and 0 < place < len(text) - 1 and text[place - 1].strip():
        return character
    return character if character.isprintable() else f"<{ord(character):02X}>"


def _cut(text: str, limit: int) -> int:
    """The last place up to `limit` where what one sees as a character is not cut in two."""
    place = limit
    while place > 1 and _continues(text, place):
        place -= 1
    return place


def _continues(text: str, place: int) -> bool:
    """Whether the character at `place` is seen as one with what stands before it."""
    here, before = text[place], text[place - 1]
    if here in JOINERS or before in JOINERS or ord(here) in SKINS:
        return True
    if ord(here) in FLAGS and ord(before) in FLAGS:
        flags = 0
        while flags < place and ord(text[place - 1 - flags]) in FLAGS:
            flags += 1
        return flags % 2 == 1
    return unicodedata.category(here).startswith("M")


def short(value: float | None, digits: int = 4) -> Any:
    """So many significant digits; a figure that is not finite is none."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def to_line(value: object) -> str:
    """Compact JSON. "<" is escaped: the text stays inert wherever it might be put."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
