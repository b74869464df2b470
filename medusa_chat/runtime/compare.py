"""Compare: one prompt answered twice, plain and with a drafter, one after the other.

What makes the two fair: both go through the session's queue, never at the same time; they share
weights, precision, seed and every other setting; each starts from an empty cache (messages.Fresh),
so that the second finds no prompt already read; a short warm-up of each comes before, and no figure
counts it; who goes first is the caller's choice, to be alternated. All times are the ones that
the events carry, measured beside the model.
"""

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from medusa_chat.decoding.events import Event, Finished
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError, ModelError, UsageError
from medusa_chat.messages import Fresh, Peek, PeekRequest, Text
from medusa_chat.runtime.recordings import Comparison, Difference, compared
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.scheduler import Ticket
from medusa_chat.runtime.session import Session

Side = Literal["plain", "drafted"]
Stage = Literal["waiting", "warming up", "running"]
SIDES: tuple[Side, Side] = ("plain", "drafted")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Progress:
    """How far a comparison is. place: which of its answers runs, 1 or 2. ahead: how many requests
    come before it while it waits."""

    side: Side
    place: int
    stage: Stage
    ahead: int = 0
    tokens: int = 0
    seconds: float = 0.0


def compare(
    session: Session,
    text: Text,
    settings: GenerationSettings,
    *,
    plain_first: bool = True,
    guest: str = "",
) -> Iterator[Progress | Comparison]:
    """Answer plain and as `settings` say, one after the other: Progress, then one Comparison.

    It never waits: the caller pauses between two of them. Closing the iterator stops what runs.
    guest: as in Session.submit. Raises MedusaChatError when a side fails or is stopped.
    """
    if settings.drafter == "none":
        raise UsageError("both sides would be plain decoding: choose another drafter than none")
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    of_side = {
        "plain": replace(settings, drafter="none", seed=seed),
        "drafted": replace(settings, seed=seed),
    }
    order = SIDES if plain_first else SIDES[::-1]
    short = min(WARM_UP_TOKENS, settings.max_new_tokens)
    for place, side in enumerate(order, 1):
        warm_up = replace(of_side[side], max_new_tokens=short)
        ticket = session.submit(Reply(Fresh(text), warm_up), guest)
        yield from _follow(session, ticket, Progress(side, place, "warming up"))
    traces: dict[Side, list[Event]] = {}
    for place, side in enumerate(order, 1):
        ticket = session.submit(Reply(Fresh(text), of_side[side]), guest)
        yield from _follow(session, ticket, Progress(side, place, "running"))
        traces[side] = ticket.trace
    yield compared(traces["plain"], traces["drafted"], plain_first)


def gap_request(session: Session, found: Comparison) -> PeekRequest | None:
    """What to ask for the gap; None where nothing is to be asked. Raises ModelError when the
    model that answered is no longer the one that is loaded."""
    parts, plain = found.difference, found.plain.token_ids
    if parts is None or parts.index >= min(len(plain), len(found.drafted.token_ids)):
        return None
    model = session.state.model
    if model is None or (model.name, model.precision) != (found.model, found.precision):
        raise ModelError("another model is loaded now: run both again")
    both = plain[parts.index], found.drafted.token_ids[parts.index]
    return PeekRequest((*found.prompt_token_ids, *plain[: parts.index]), tokens=both)


def add_gap(found: Comparison, peek: Peek) -> Comparison:
    """The comparison with what the model said to `gap_request`."""
    one, two = peek.asked
    parts, gap = found.difference, None
    assert parts is not None
    if one.probability > 0 and two.probability > 0:
        gap = math.log(one.probability) - math.log(two.probability)
    return replace(found, difference=Difference(parts.index, one.text, two.text, gap))


def _follow(session: Session, ticket: Ticket[Event], begun: Progress) -> Iterator[Progress]:
    """The progress of one answer until it has ended well; raises why it has not."""
    taken, tokens, seconds = 0, 0, 0.0
    try:
        while True:
            is_over = ticket.done.is_set()
            for event in ticket.trace[taken:]:
                taken += 1
                if not isinstance(event, Finished):
                    tokens, seconds = tokens + len(event.token_ids), seconds + event.seconds
            is_waiting = ticket.state == "waiting"
            stage = "waiting" if is_waiting else begun.stage
            ahead = session.position(ticket) if is_waiting else 0
            yield Progress(begun.side, begun.place, stage, ahead, tokens, seconds)
            if is_over:
                break
    finally:
        if not ticket.done.is_set():
            session.cancel(ticket)
    if ticket.error:
        raise MedusaChatError(ticket.error)
    last = ticket.trace[-1]
    assert isinstance(last, Finished)
    if last.reason == "cancelled":
        raise MedusaChatError("stopped: a comparison needs two finished answers")
    if last.reason == "error":
        raise MedusaChatError(last.message)
