"""Answer: the events of one job folded into text and rates. No gradio."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from medusa_chat.decoding.events import Event, Finished, Prefilled, Stats, Step
from medusa_chat.messages import Message
from medusa_chat.runtime.repetition import repeats_from
from medusa_chat.ui.page.markup import inert, with_drawn_dollars
from medusa_chat.ui.page.tree_view import to_line

STOPPED = "stopped"
NOTES = {
    "cancelled": STOPPED,
    "length": "stopped: the limit of new tokens is reached",
    "context": "stopped: the context is full",
    "stop": "ended by the stop string {stops}",
    "error": "stopped: {message}",
}
LOOP = "repeats itself from “{passage}” on; its figures leave that out"
MOST_OF_PASSAGE = 40  # characters that are quoted of it
Piece = tuple[str, int]  # a text, and how many tokens came in the step that gave it


class Counted(NamedTuple):
    """The steps that an answer's figures are taken of: how many, their tokens (an end token counts
    once the answer is over, as it does in its rate), and the seconds they took; of these, those of
    the backbone's passes and of the drafts."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    backbone_seconds: float = 0.0
    heads_seconds: float = 0.0

    def plus(self, step: Step) -> "Counted":
        """With a step more."""
        return Counted(
            self.steps + 1,
            self.tokens + len(step.token_ids),
            self.seconds + step.seconds,
            self.backbone_seconds + step.backbone_seconds,
            self.heads_seconds + step.heads_seconds,
        )

    @property
    def per_step(self) -> float | None:
        """Tokens per step: the acceleration rate."""
        return self.tokens / self.steps if self.steps else None

    @property
    def rate(self) -> float | None:
        """Tokens per second of decoding, prefill left out."""
        return self.tokens / self.seconds if self.seconds > 0 else None


@dataclass(eq=False)
class Answer:
    """One answer as far as it has come. before, thought: the pieces and the reasoning that it goes
    on from, when it is continued. skips: the text in `before` that its first event says again.

    live: JSON lines that only ever grow, so that a browser gets the new ones alone: a list is
    pieces of text, [tokens, text, tokens, text ...]; an object a status, or more reasoning. pieces:
    all of them, and text what they say. reasoning: all of it, which is no part of the text. loop:
    the first step from which on it only repeats itself; None where it does not, or is not over.
    """

    number: int = 0
    before: Sequence[Piece] = ()
    thought: str = ""
    skips: str = ""
    prefilled: Prefilled | None = None
    steps: list[Step] = field(default_factory=list)
    finished: Finished | None = None
    live: str = ""
    text: str = ""
    reasoning: str = ""
    pieces: list[Piece] = field(default_factory=list)
    all_steps: Counted = Counted()
    first_seconds: float | None = None  # from asking to the first token; None: not known
    is_kept: bool = False  # whether anything of it may be written to the owner's disk
    loop: int | None = None
    _before_loop: Counted | None = None
    _status: str = ""

    def __post_init__(self) -> None:
        self._think(self.thought)
        self._append(self.before)

    def add(self, events: Iterable[Event]) -> None:
        """Fold in what is new in the trace."""
        new: list[Piece] = []
        for event in map(self._without_said, events):
            self._count(event)
            self._think(self._new_reasoning(event))
            if isinstance(event, Step):
                new.append((event.text, len(event.token_ids)))
            elif isinstance(event, Prefilled):
                new.append((event.text, 1))
            else:
                new.append((event.tail, len(self.steps[-1].token_ids) if self.steps else 1))
        self._append(new)

    def _without_said(self, event: Event) -> Event:
        """The event without the text that stood before it already."""
        if self.skips and isinstance(event, Prefilled | Finished):
            return replace(event, text=event.text.removeprefix(self.skips))
        return event

    def head(self, count: int) -> "Answer":
        """The answer as if it had been stopped after `count` steps; itself where it has no more."""
        if self.prefilled is None or count >= len(self.steps):
            return self
        first, steps = self.prefilled, self.steps[:count]
        ids = first.token_ids + tuple(token for step in steps for token in step.token_ids)
        text = first.text + "".join(step.text for step in steps)
        thought = first.reasoning + "".join(step.reasoning for step in steps)
        seconds, emitted = sum(step.seconds for step in steps), len(ids) - len(first.token_ids)
        stats = Stats.of(len(ids), count, emitted, seconds, first.seconds)
        made = Answer(self.number, self.before, self.thought, first_seconds=self.first_seconds)
        made.add([first, *steps, Finished("cancelled", ids, text, "", stats, "", thought)])
        return made

    def recall(self, events: Iterable[Event]) -> None:
        """Take the recorded events of this answer back, whose text is here already."""
        self.steps, self.all_steps = [], Counted()
        self.loop = self._before_loop = None
        for event in events:
            self._count(event)

    @property
    def events(self) -> list[Event]:
        """All that was recorded of it."""
        ends = ([self.prefilled], [self.finished])
        first, last = ([event for event in end if event is not None] for end in ends)
        return [*first, *self.steps, *last]

    def _count(self, event: Event) -> None:
        if isinstance(event, Step):
            self.steps.append(event)
            self.all_steps = self.all_steps.plus(event)
        elif isinstance(event, Prefilled):
            self.prefilled = event
        else:
            self.finished = event
            self._find_loop(event)

    def _find_loop(self, last: Finished) -> None:
        begins = repeats_from(last.token_ids)
        known = len(last.token_ids) - self.tokens  # before the first step
        if begins is None or known < 0:
            return
        before = Counted()
        for step in self.steps:
            if known + before.tokens + len(step.token_ids) > begins:
                self.loop, self._before_loop = before.steps, before
                return
            before = before.plus(step)

    def say(self, status: str) -> None:
        """Tell what happens while there is no text."""
        if status != self._status:
            self._status = status
            self.live += to_line({"status": status}) + "\n"

    def forget(self) -> None:
        """Let go of the trees of the steps, which are nearly all of the memory."""
        self.steps = []

    @property
    def tokens(self) -> int:
        """Tokens that its steps gave."""
        return self.all_steps.tokens

    @property
    def is_empty(self) -> bool:
        """Whether nothing was generated."""
        known = len([piece for piece in self.before if piece[0]])
        return len(self.pieces) == known and self.reasoning == self.thought

    @property
    def note(self) -> str:
        """Why the answer ended before its end, and that it repeats itself; empty else."""
        if self.finished is None:
            return NOTES["cancelled"]
        stops = self.prefilled.settings.get("stop") if self.prefilled else None
        quoted = " or ".join(f"“{text}”" for text in stops or ())
        end = NOTES.get(self.finished.reason, "")
        end = end.format(message=self.finished.message, stops=quoted)
        return "; ".join(filter(None, (end, self._loop_note)))

    @property
    def _loop_note(self) -> str:
        if self.loop is None:
            return ""
        passage = " ".join("".join(step.text for step in self.steps[self.loop :]).split())
        cut = passage if len(passage) <= MOST_OF_PASSAGE else f"{passage[:MOST_OF_PASSAGE]}…"
        return LOOP.format(passage=cut or "its reasoning")

    @property
    def model_key(self) -> tuple[str, str, str, str] | None:
        """The model, backbone, precision and device that a speed was measured with."""
        first = self.prefilled
        return (first.model, first.backbone, first.precision, first.device) if first else None

    @property
    def is_plain(self) -> bool:
        """Whether this is plain decoding: drafter "none"."""
        return self.prefilled is not None and self.prefilled.settings.get("drafter") == "none"

    @property
    def counted(self) -> Counted:
        """What its figures are taken of: all steps, or those before it repeats itself, for guessing
        what was said already is no merit of a drafter."""
        if self._before_loop is not None:
            return self._before_loop
        if self.finished is not None and self.finished.stats.tokens_per_second:
            stats = self.finished.stats
            whole = self.all_steps
            return whole._replace(steps=stats.steps, tokens=stats.emitted, seconds=stats.seconds)
        return self.all_steps

    @property
    def rate(self) -> float | None:
        """Tokens per second of decoding, prefill left out."""
        return self.counted.rate

    def overhead(self, plain: float | None) -> float | None:
        """Seconds of a step over those of a plain one. plain: tokens per second of plain decoding.
        Below 1 it is noise of the measurement: a tree costs no less than its root."""
        of = self.counted
        return of.seconds / of.steps * plain if plain and of.steps and of.seconds else None

    def speedup(self, plain: float | None) -> float | None:
        """Tokens per step / overhead, where one below 1 counts as 1."""
        rate, overhead = self.counted.per_step, self.overhead(plain)
        return rate / max(1.0, overhead) if rate and overhead else None

    @property
    def plain_rate(self) -> float | None:
        """Tokens per second of plain decoding, timed beside this answer; None where none was."""
        seconds = self.finished.stats.plain_step_seconds if self.finished is not None else None
        return 1 / seconds if seconds else None

    def _new_reasoning(self, event: Event) -> str:
        """The reasoning that an event adds; the last one has all of it."""
        if isinstance(event, Finished):
            return event.reasoning[len(self.reasoning) - len(self.thought) :]
        return event.reasoning

    def _think(self, more: str) -> None:
        if more:
            self.reasoning += more
            self.live += to_line({"thought": more}) + "\n"

    def _append(self, pieces: Sequence[Piece]) -> None:
        pieces = [piece for piece in pieces if piece[0]]
        if pieces:
            self.pieces += pieces
            self.text += "".join(text for text, _ in pieces)
            self.live += pieces_line(pieces) + "\n"


def pieces_before(answer: Answer, index: int, node: int) -> list[Piece]:
    """Pieces of the recorded answer that say nothing from `node` of step `index` on. The root of a
    step came with the step before it, of which nothing is said then."""
    steps = index if node else index - 1
    if answer.prefilled is None or steps < 0:
        return []
    first = (answer.prefilled.text, 1)
    return [first, *((step.text, len(step.token_ids)) for step in answer.steps[:steps])]


def pieces_line(pieces: Iterable[Piece]) -> str:
    """Pieces as the page reads them: tokens and text in turn."""
    return to_line([part for text, tokens in pieces for part in (tokens, text)])


class Row(NamedTuple):
    """One row of the conversation shown. position: of the message.

    kind: "text" can be edited, "reasoning" is folded, "note" says why an answer was cut short.
    """

    position: int
    kind: str
    text: str
    pieces: tuple[Piece, ...] = ()


def rows(
    messages: Sequence[Message],
    notes: Mapping[int, str],
    answers: Mapping[int, Answer],
    first: int = 0,
) -> Iterator[Row]:
    """The rows of each message from `first` on: reasoning, text, and why it was cut short."""
    for position in range(first, len(messages)):
        yield from _rows_of(position, messages[position], answers.get(position))
        if note := notes.get(position):
            yield Row(position, "note", note)


def _rows_of(position: int, message: Message, answer: Answer | None) -> Iterator[Row]:
    text = message["content"]
    if message["role"] != "assistant":
        yield Row(position, "text", text)
        return
    pieces = answer.pieces if answer and answer.text == text else ()
    thought = message.get("reasoning", "")
    if thought.strip():
        yield Row(position, "reasoning", thought)
    if text.strip():
        yield Row(position, "text", text, tuple(pieces))
    elif not thought.strip():
        yield Row(position, "note", "the model ended its answer at once")


def chatbot_row(row: Row, role: str) -> dict[str, Any]:
    """A row as gr.Chatbot takes it: nothing in it is HTML, and a formula of an answer is drawn."""
    if row.kind == "note":
        text = f'<span class="answer-note">{_literal(row.text)}</span>'
    else:
        text = inert(with_drawn_dollars(row.text) if role == "assistant" else row.text)
    entry: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": text}]}
    if row.kind == "reasoning":
        entry["metadata"] = {"title": "Thought", "status": "done"}
    return entry


def _literal(text: str) -> str:
    """A line that neither HTML nor Markdown changes."""
    return "".join(c if c.isalnum() or c in " .,:;" else f"&#{ord(c)};" for c in text)
