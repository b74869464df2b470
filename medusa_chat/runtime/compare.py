"""Compare: answers a prompt twice, plain or with two drafters, one after the other."""

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.events import Event, Finished, Prefilled, Reason, Stats, Step
from medusa_chat.decoding.reasoning import BETWEEN
from medusa_chat.decoding.settings import GREEDY, GenerationSettings
from medusa_chat.errors import MedusaChatError, ModelError, UsageError
from medusa_chat.messages import Fresh, Peek, PeekRequest, Text
from medusa_chat.runtime.repetition import repeats_from
from medusa_chat.runtime.requests import Reply, Ticket
from medusa_chat.runtime.session import Session

END_OF_TEXT = "end of text"
PLAIN_STEPS = 8  # a plain answer with fewer is no measure of its speed


@dataclass(frozen=True)
class Frame:
    """What one event added. seconds: prefill and steps so far. nodes: of the step, including its
    root, so 1 for a plain step; 0 for an event that is not a step."""

    seconds: float
    text: str
    tokens: int
    nodes: int = 0


@dataclass(frozen=True)
class Recording:
    """One answer with its timing. token_texts: the text of each token. loop: the index of the first
    token from which on it only repeats itself, None where it does not; counted: the figures of the
    steps before it, of all where there is none."""

    drafter: str
    frames: tuple[Frame, ...]
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    text: str
    reason: Reason
    stats: Stats
    counted: Stats
    loop: int | None = None

    @classmethod
    def of(cls, trace: Sequence[Event]) -> Self:
        """The recording of a whole trace: Prefilled, steps, Finished."""
        first, *middle, last = trace
        assert isinstance(first, Prefilled) and isinstance(last, Finished)
        steps = [event for event in middle if isinstance(event, Step)]
        loop = repeats_from(last.token_ids)
        until = None if loop is None else _until(loop - len(first.token_ids), steps, last)
        return cls(
            drafter=first.settings.get("drafter") or "",
            frames=tuple(_frames(trace)),
            token_ids=last.token_ids,
            token_texts=_token_texts(last.token_ids, steps),
            text="".join(frame.text for frame in _frames(trace)),
            reason=last.reason,
            stats=last.stats,
            counted=until or last.stats,
            loop=loop,
        )

    @property
    def total_seconds(self) -> float:
        """Prefill and all steps."""
        return self.stats.prefill_seconds + self.stats.seconds


@dataclass(frozen=True)
class Difference:
    """The first difference of two answers: the token's index from 0, and both tokens as text.

    gap: log p of the plain answer's token minus log p of the other token there, by the backbone at
    temperature 1; None until it is measured (`add_gap`), or if one answer had ended.
    """

    index: int
    plain: str
    drafted: str
    gap: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two recordings for one prompt. plain: the side that the other is measured against, usually
    plain decoding; settings: the drafted side's, resolved; the other's differ only in the drafter
    and its tree. difference: None for identical answers."""

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
        kind = kinds.BY_NAME.get(self.plain.drafter, kinds.NONE)
        ours = "plain decoding" if kind is kinds.NONE else f"decoding with {kind.label}"
        return f"our {ours}, {self.precision}, {self.device}, same weights"

    @property
    def is_against_plain(self) -> bool:
        """Whether the baseline is plain decoding."""
        return self.plain.drafter == kinds.NONE.name

    @property
    def acceleration_rate(self) -> float | None:
        """Tokens per step of the drafted side, until it repeats itself."""
        return self.drafted.counted.acceleration_rate

    @property
    def relative_rate(self) -> float | None:
        """Tokens per step of the drafted side over those of the other: 1 where that is plain."""
        theirs = 1.0 if self.is_against_plain else self.plain.counted.acceleration_rate
        rate = self.acceleration_rate
        return rate / theirs if rate and theirs else None

    @property
    def overhead(self) -> float | None:
        """Milliseconds per step over milliseconds per step of the other side. Below 1 it is noise
        of the measurement where that is plain: a tree costs no less than its root alone."""
        ours, plain = self.drafted.counted.step_seconds, self.plain.counted.step_seconds
        return ours / plain if ours and plain else None

    @property
    def is_noise(self) -> bool:
        """Whether the overhead is one that no tree can have."""
        return self.is_against_plain and (self.overhead or 1.0) < 1

    @property
    def speedup(self) -> float | None:
        """Acceleration rate / overhead, where noise counts as 1: the ratio of the tokens per
        second, without prefill."""
        rate, overhead = self.relative_rate, self.overhead
        if not rate or not overhead:
            return None
        return rate / (1.0 if self.is_noise else overhead)

    @property
    def loop(self) -> int | None:
        """The index of the first token from which on an answer only repeats itself: guessing what
        was said already is no merit of a drafter."""
        found = [side.loop for side in (self.plain, self.drafted) if side.loop is not None]
        return min(found, default=None)

    @property
    def is_race(self) -> bool:
        """Whether the times of the whole answers compare like with like: they are as long, and do
        not repeat themselves."""
        return self.loop is None and len(self.plain.token_ids) == len(self.drafted.token_ids)

    @property
    def wall_clock_ratio(self) -> float | None:
        """The plain side's decoding seconds over the drafted side's, for the whole answers.

        It equals the speedup if both have the same number of tokens and no other program ran. For
        answers of different lengths only the speedup is a fair comparison.
        """
        return _ratio(self.plain.stats.seconds, self.drafted.stats.seconds)

    @property
    def total_ratio(self) -> float | None:
        """The speedup including prefill, which no drafter makes faster."""
        return _ratio(self.plain.total_seconds, self.drafted.total_seconds)

    @property
    def is_lossy(self) -> bool:
        """Whether the acceptance may change the text, so that a difference is expected."""
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
    """The first difference of the answers; one that has ended has "end of text" there."""
    ids = plain.token_ids, drafted.token_ids
    if ids[0] == ids[1]:
        return None
    pairs = enumerate(zip(*ids, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(map(len, ids)))
    return Difference(index, _token_at(plain, index), _token_at(drafted, index))


def _frames(trace: Sequence[Event]) -> Iterator[Frame]:
    """The texts in order, with reasoning, and a blank line between it and the reply."""
    seconds, thought, is_said = 0.0, 0, False
    for event in trace:
        if isinstance(event, Finished):
            reasoning, said = event.reasoning[thought:], event.tail
        else:
            reasoning, said = event.reasoning, event.text
        thought += len(reasoning)
        text = reasoning + BETWEEN * bool(thought and said and not is_said) + said
        is_said |= bool(said)
        if not isinstance(event, Finished):
            seconds += event.seconds
            nodes = event.nodes if isinstance(event, Step) else 0
            yield Frame(seconds, text, len(event.token_ids), nodes)
        elif text:
            yield Frame(seconds, text, 0)


def _until(tokens: int, steps: Sequence[Step], last: Finished) -> Stats:
    """The figures of the first steps, those that gave at most so many tokens."""
    count = emitted = 0
    for step in steps:
        if emitted + len(step.token_ids) > tokens:
            break
        count, emitted = count + 1, emitted + len(step.token_ids)
    seconds = sum(step.seconds for step in steps[:count])
    busy = sum(step.busy_seconds for step in steps[:count]) or None
    return Stats.of(emitted, count, emitted, seconds, last.stats.prefill_seconds, busy)


def _token_texts(ids: Sequence[int], steps: Sequence[Step]) -> tuple[str, ...]:
    """The text of each token, which is in a step's draft or follows its path."""
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
    """The conditions that both runs must share: model, device, prompt, and reused prompt tokens."""
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
    """The progress of a comparison. place: which of its answers runs, 1 or 2. ahead: how many
    requests it waits for."""

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
    against: str = kinds.NONE.name,
) -> Iterator[Progress | Comparison]:
    """Answer plain, or by the drafter `against`, and with `settings`, one after the other:
    Progress, then one Comparison.

    It never blocks: the caller pauses between two values. Closing the iterator stops the running
    answer. guest: as in Session.submit. Raises MedusaChatError when a side fails or is stopped.
    """
    if settings.drafter == "none":
        raise UsageError("both sides would be plain decoding: choose another drafter than none")
    if against == (settings.drafter or kinds.AUTO):
        raise UsageError(f"both sides would be {against}: choose two drafters")
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    of_side = {
        "plain": replace(settings, drafter=against, seed=seed),
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
    """The request for the probabilities of the two tokens at the first difference; None if there is
    nothing to measure. Raises ModelError if another model is loaded by now."""
    parts, plain = comparison.difference, comparison.plain.token_ids
    if parts is None or parts.index >= min(len(plain), len(comparison.drafted.token_ids)):
        return None
    model = session.state.model
    if model is None or (model.name, model.precision) != (comparison.model, comparison.precision):
        raise ModelError("another model is loaded now: run both again")
    both = plain[parts.index], comparison.drafted.token_ids[parts.index]
    return PeekRequest((*comparison.prompt_token_ids, *plain[: parts.index]), tokens=both)


def add_gap(comparison: Comparison, peek: Peek) -> Comparison:
    """The comparison with the gap from the result of `gap_request`."""
    one, two = peek.asked
    parts, gap = comparison.difference, None
    assert parts is not None
    if one.probability > 0 and two.probability > 0:
        gap = math.log(one.probability) - math.log(two.probability)
    return replace(comparison, difference=Difference(parts.index, one.text, two.text, gap))


def _follow(session: Session, ticket: Ticket[Event], begun: Progress) -> Iterator[Progress]:
    """The progress of one answer until it has finished. Raises MedusaChatError if it failed."""
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
