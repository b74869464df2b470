"""Compare: one prompt answered twice, plain and with a drafter, one after the other."""

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from medusa_chat.decoding.events import Event, Finished, Prefilled, Reason, Stats, Step
from medusa_chat.decoding.reasoning import BETWEEN
from medusa_chat.decoding.settings import GREEDY, GenerationSettings
from medusa_chat.errors import MedusaChatError, ModelError, UsageError
from medusa_chat.messages import Fresh, Peek, PeekRequest, Text
from medusa_chat.runtime.requests import Reply, Ticket
from medusa_chat.runtime.session import Session

END_OF_TEXT = "end of text"
PLAIN_STEPS = 8  # a plain answer with fewer is no measure of its speed


@dataclass(frozen=True)
class Frame:
    """What one event added. seconds: since the request was begun, prefill and steps summed up.
    nodes: of the step, its root included, 1 for a plain one; 0 where it is no step."""

    seconds: float
    text: str
    tokens: int
    nodes: int = 0


@dataclass(frozen=True)
class Recording:
    """One answer as it came. token_texts: the own text of each token. stats: the answer's own."""

    drafter: str
    frames: tuple[Frame, ...]
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    text: str
    reason: Reason
    stats: Stats

    @classmethod
    def of(cls, trace: Sequence[Event]) -> Self:
        """The recording of a whole trace: Prefilled, steps, Finished."""
        first, *steps, last = trace
        assert isinstance(first, Prefilled) and isinstance(last, Finished)
        return cls(
            drafter=first.settings.get("drafter") or "",
            frames=tuple(_frames(trace)),
            token_ids=last.token_ids,
            token_texts=_token_texts(last.token_ids, [s for s in steps if isinstance(s, Step)]),
            text="".join(frame.text for frame in _frames(trace)),
            reason=last.reason,
            stats=last.stats,
        )

    @property
    def total_seconds(self) -> float:
        """Prefill and all steps."""
        return self.stats.prefill_seconds + self.stats.seconds


@dataclass(frozen=True)
class Difference:
    """Where two answers part: the token's place from 0, both tokens as text.

    gap: log p of plain's token less log p of the other at that place, by the backbone at
    temperature 1; None while nobody asked (`add_gap`), or where an answer had ended.
    """

    index: int
    plain: str
    drafted: str
    gap: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two recordings of one prompt. settings: the drafted side's, resolved; plain's differ in the
    drafter and its tree alone. difference: None when the answers are identical."""

    plain: Recording
    drafted: Recording
    is_plain_first: bool
    model: str
    precision: str
    device: str
    settings: dict[str, Any]
    prompt_token_ids: tuple[int, ...]
    difference: Difference | None

    @property
    def baseline(self) -> str:
        """The baseline of the speedup."""
        return f"our plain decoding, {self.precision}, {self.device}, same weights"

    @property
    def acceleration_rate(self) -> float | None:
        """Tokens per step of the drafted side."""
        return self.drafted.stats.acceleration_rate

    @property
    def overhead(self) -> float | None:
        """Milliseconds per tree step over milliseconds per plain step."""
        ours, plain = self.drafted.stats.step_seconds, self.plain.stats.step_seconds
        return ours / plain if ours and plain else None

    @property
    def speedup(self) -> float | None:
        """Acceleration rate / overhead: how many times the tokens per second, prefill apart."""
        rate, overhead = self.acceleration_rate, self.overhead
        return rate / overhead if rate and overhead else None

    @property
    def wall_clock_ratio(self) -> float | None:
        """Plain's decoding seconds over the drafted side's, as measured for the whole answers.

        The speedup itself when both have as many tokens and no other program ran; answers of
        different lengths do different amounts of work, and then only the speedup compares like
        with like.
        """
        return _ratio(self.plain.stats.seconds, self.drafted.stats.seconds)

    @property
    def total_ratio(self) -> float | None:
        """The speedup with prefill included, which no drafter makes faster."""
        return _ratio(self.plain.total_seconds, self.drafted.total_seconds)

    @property
    def is_lossy(self) -> bool:
        """Whether the acceptance may change the text: then a difference is expected."""
        is_greedy = self.settings.get("temperature", 0.0) < GREEDY
        return self.settings.get("acceptance") != "exact" and not is_greedy


def compared(
    plain: Sequence[Event], drafted: Sequence[Event], is_plain_first: bool = True
) -> Comparison:
    """Two whole traces side by side. Raises MedusaChatError when they cannot be compared."""
    first, other = plain[0], drafted[0]
    assert isinstance(first, Prefilled) and isinstance(other, Prefilled)
    if _start(first) != _start(other):
        raise MedusaChatError("the model was changed between the two runs: run both again")
    one, two = Recording.of(plain), Recording.of(drafted)
    return Comparison(
        plain=one,
        drafted=two,
        is_plain_first=is_plain_first,
        model=first.model,
        precision=first.precision,
        device=first.device,
        settings=other.settings,
        prompt_token_ids=first.prompt_token_ids,
        difference=first_difference(one, two),
    )


def first_difference(plain: Recording, drafted: Recording) -> Difference | None:
    """Where the answers part; an answer that is over has "end of text" there."""
    ids = plain.token_ids, drafted.token_ids
    if ids[0] == ids[1]:
        return None
    pairs = enumerate(zip(*ids, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(map(len, ids)))
    return Difference(index, _token_at(plain, index), _token_at(drafted, index))


def _frames(trace: Sequence[Event]) -> Iterator[Frame]:
    """The texts as they came, reasoning too, a blank line between it and what is said."""
    seconds, thought, is_said = 0.0, 0, False
    for event in trace:
        is_last = isinstance(event, Finished)
        reasoning = event.reasoning[thought:] if is_last else event.reasoning
        said = event.tail if is_last else event.text
        thought += len(reasoning)
        text = reasoning + BETWEEN * bool(thought and said and not is_said) + said
        is_said |= bool(said)
        if not isinstance(event, Finished):
            seconds += event.seconds
            nodes = event.nodes if isinstance(event, Step) else 0
            yield Frame(seconds, text, len(event.token_ids), nodes)
        elif text:
            yield Frame(seconds, text, 0)


def _token_texts(ids: Sequence[int], steps: Sequence[Step]) -> tuple[str, ...]:
    """Every token stands in a draft, or behind its path."""
    texts: dict[int, str] = {}
    for step in steps:
        if draft := step.draft:
            tokens = (*draft.tokens, *step.token_ids[len(step.path) - 1 :])
            texts |= dict(zip(tokens, (*draft.texts, draft.next_text), strict=False))
    return tuple(texts.get(token) or f"token {token}" for token in ids)


def _token_at(recording: Recording, index: int) -> str:
    texts = recording.token_texts
    return texts[index] if index < len(texts) else END_OF_TEXT


def _start(first: Prefilled) -> tuple[object, ...]:
    """The conditions both runs must share: model, placement, prompt, and cached prompt tokens."""
    ids = first.prompt_token_ids
    return first.model, first.precision, first.device, ids, first.reused_tokens


def _ratio(plain: float, drafted: float) -> float | None:
    return plain / drafted if plain and drafted else None


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


def gap_request(session: Session, comparison: Comparison) -> PeekRequest | None:
    """What to ask for the gap; None where nothing is to be asked. Raises ModelError when the
    model that answered is no longer the one that is loaded."""
    parts, plain = comparison.difference, comparison.plain.token_ids
    if parts is None or parts.index >= min(len(plain), len(comparison.drafted.token_ids)):
        return None
    model = session.state.model
    if model is None or (model.name, model.precision) != (comparison.model, comparison.precision):
        raise ModelError("another model is loaded now: run both again")
    both = plain[parts.index], comparison.drafted.token_ids[parts.index]
    return PeekRequest((*comparison.prompt_token_ids, *plain[: parts.index]), tokens=both)


def add_gap(comparison: Comparison, peek: Peek) -> Comparison:
    """The comparison with what the model said to `gap_request`."""
    one, two = peek.asked
    parts, gap = comparison.difference, None
    assert parts is not None
    if one.probability > 0 and two.probability > 0:
        gap = math.log(one.probability) - math.log(two.probability)
    return replace(comparison, difference=Difference(parts.index, one.text, two.text, gap))


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
