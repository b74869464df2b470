"""Trace line: an event of an answer as JSON, as a trace on disk or in a pipe holds it."""

import math
from dataclasses import fields
from typing import Any

from medusa_chat.decoding.events import DraftRecord, Event, Finished, Prefilled, Stats, Step

KINDS: dict[str, type[Event]] = {"prefilled": Prefilled, "step": Step, "finished": Finished}
NAMES = {kind: name for name, kind in KINDS.items()}


def to_json(event: Event) -> dict[str, Any]:
    """The event as one line of a trace holds it; a figure that is not finite becomes null."""
    return {"event": NAMES[type(event)], **_plain(event)}


def from_json(values: dict[str, Any]) -> Event:
    """The event of one trace line. Unknown fields are ignored; raises ValueError if it is none."""
    kind = KINDS.get(values.get("event", ""))
    if kind is None:
        raise ValueError(f"not a trace line: event is {values.get('event')!r}")
    known = {f.name: _frozen(values[f.name]) for f in fields(kind) if f.name in values}
    if kind is Prefilled:
        known["settings"] = dict(values.get("settings", {}))
    if kind is Step and known.get("draft") is not None:
        draft = values["draft"]
        known["draft"] = DraftRecord(
            **{f.name: _frozen(draft[f.name]) for f in fields(DraftRecord) if f.name in draft}
        )
    if kind is Finished:
        known["stats"] = Stats(**{f.name: values["stats"].get(f.name) for f in fields(Stats)})
    return kind(**known)


def _plain(value: Any) -> Any:
    if isinstance(value, (Prefilled, Step, Finished, DraftRecord, Stats)):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
