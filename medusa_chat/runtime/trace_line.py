"""Trace line: an event of an answer as JSON, as a trace on disk or in a pipe holds it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any

from medusa_chat.decoding.events import (
    DraftRecord,
    Event,
    Finished,
    Learnt,
    Prefilled,
    Stats,
    Step,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

KINDS: dict[str, type[Event]] = {"prefilled": Prefilled, "step": Step, "finished": Finished}
NAMES = {kind: name for name, kind in KINDS.items()}
NUMBERS = ("temperature", "posterior_threshold", "posterior_alpha")  # settings that pictures need
PER_NODE = (
    *("parents", "ranks", "draft_probabilities", "probabilities", "entropies", "thresholds"),
    "sampled",
)


def to_json(event: Event) -> dict[str, Any]:
    """The event as one line of a trace holds it; a figure that is not finite becomes null."""
    return {"event": NAMES[type(event)], **_plain(event)}


def from_json(values: Any) -> Event:
    """The event of one trace line. Unknown fields are ignored; raises ValueError where it is none,
    or holds what no event has: a value of another type, or nodes that are no tree."""
    name = values.get("event") if isinstance(values, dict) else None
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"not a trace line: event is {name!r:.80}")
    event = _reader(kind).validate_python(values)
    if isinstance(event, Prefilled):
        _require_numbers(event.settings)
    if isinstance(event, Step) and event.draft is not None:
        _require_tree(event.draft, event.path)
    return event


@cache
def _reader(kind: type[Event]) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # 0.1 s, which who only writes traces need not wait for

    return TypeAdapter(kind)


def _require_numbers(settings: Mapping[str, Any]) -> None:
    for name in NUMBERS:
        if type(settings.get(name)) not in (int, float, NoneType):
            raise ValueError(f"the setting {name} is no number")


def _require_tree(draft: DraftRecord, path: Sequence[int]) -> None:
    """Raises ValueError where a list has not an entry per node, or a node that does not exist."""
    nodes = len(draft.tokens)
    if any(len(getattr(draft, name)) != nodes for name in PER_NODE):
        raise ValueError("a list of the draft has not an entry per node")
    if any(len(getattr(draft, name)) not in (0, nodes) for name in ("texts", "sources")):
        raise ValueError("a list of the draft has not an entry per node")
    if any(not -1 <= parent < node for node, parent in enumerate(draft.parents)):
        raise ValueError("a parent does not stand before its nodes")
    if any(not 0 <= node < nodes for node in path):
        raise ValueError("the path leads to no node")


def _plain(value: Any) -> Any:
    if isinstance(value, (Prefilled, Step, Finished, DraftRecord, Stats, Learnt)):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
