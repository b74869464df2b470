"""Transcript: a conversation at one moment, by the messages that are shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from medusa_chat.messages import Message
from medusa_chat.runtime.answer_figures import AnswerFigures
from medusa_chat.runtime.stored_conversation import MessageTree, Said
from medusa_chat.ui.chat.answer import Answer, Piece, Row
from medusa_chat.ui.page.status import named


@dataclass(frozen=True)
class Transcript:
    """A conversation at one moment: all its messages, and by position those that are shown.

    recorded: the answers of the model, by the ids of their messages; shown or not.
    """

    tree: MessageTree = field(default_factory=MessageTree)
    recorded: Mapping[int, Answer] = field(default_factory=dict)

    @classmethod
    def recalled(cls, tree: MessageTree, number: Callable[[], int]) -> "Transcript":
        """The transcript that the store kept, with its answers' pieces. number: of the next."""
        answers = {
            one.id: Answer(number(), pieces, one.reasoning, first_seconds=first_seconds_of(one))
            for one in tree.said.values()
            if (pieces := pieces_of(one.content, one.lengths))
        }
        return cls(tree, answers)

    def back_to(self, before: "Transcript") -> "Transcript":
        """The transcript without the last question, if it is new since `before`, showing what was
        shown then."""
        leaf = self.tree.leaf
        rest = self if leaf in (0, *before.tree.said) else self.without(leaf)
        return replace(rest, tree=replace(rest.tree, leaf=before.tree.leaf))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The shown messages in the form that a model takes."""
        return self.tree.messages

    @cached_property
    def notes(self) -> dict[int, str]:
        """Why answers were cut short, by position."""
        return {place: one.note for place, one in enumerate(self.tree.path) if one.note}

    @cached_property
    def answers(self) -> dict[int, Answer]:
        """The answers that are shown, by position."""
        path = enumerate(self.tree.path)
        return {at: self.recorded[one.id] for at, one in path if one.id in self.recorded}

    @property
    def last_answer(self) -> Answer | None:
        """The latest answer that is shown."""
        return self.answers[max(self.answers)] if self.answers else None

    def prompt(self, system: str, begun: str = "", thought: str = "") -> list[Message]:
        """What a model is asked with. system: a prompt before it, begun and thought: the text and
        the reasoning of the answer so far."""
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        last: list[Message] = [{"role": "assistant", "content": begun}] if begun or thought else []
        if thought:
            last[0]["reasoning"] = thought
        return [*first, *self.messages, *last]

    def last_pieces(self) -> Sequence[Piece]:
        """The last message in the pieces it came in, in one where it was edited since."""
        text, last = self.messages[-1]["content"], self.answers.get(len(self.messages) - 1)
        return last.pieces if last and last.text == text else [(text, 0)]

    def head(self, length: int) -> "Transcript":
        """Its first messages are shown; what came after them stays reachable."""
        return replace(self, tree=self.tree.head(length))

    def plus(
        self,
        role: str,
        text: str,
        answer: Answer | None = None,
        note: str = "",
        again: Said | None = None,
        onto: int | None = None,
        reasoning: str = "",
    ) -> "Transcript":
        """The transcript with a message more. again: the message that it says again. onto: the id
        of the one that its answer went on from. reasoning: where the answer has none."""
        pieces = answer.pieces if answer and answer.text == text else ()
        lengths = tuple(count for piece, tokens in pieces for count in (tokens, len(piece)))
        copied, figures = (again.copied or again.id, again.figures) if again else (0, None)
        figures = figures or (figures_of(answer) if answer else None)
        if figures and onto is not None:
            known = self.tree.said.get(onto)
            figures = figures.after(known.figures if known else None)
        reasoning = again.reasoning if again else answer.reasoning if answer else reasoning
        tree = self.tree.plus(role, text, note, lengths, copied, figures, reasoning)
        return Transcript(tree, {**self.recorded, tree.leaf: answer} if answer else self.recorded)

    def has(self, row: Row) -> bool:
        """Whether a row shows what a message still says."""
        there = self.messages[row.position : row.position + 1]
        return any(message["content"] == row.text for message in there)

    def with_text(self, row: Row, text: str) -> "Transcript":
        """Another version of one of the model's answers, with what a row shows of it rewritten;
        what was said after the one before is said after it, too."""
        message, *after = self.tree.path[row.position :]
        if text == message.content:
            return self
        made = self.head(row.position).plus(message.role, text, reasoning=message.reasoning)
        for one in after:
            made = made.plus(one.role, one.content, self.recorded.get(one.id), one.note, one)
        return made

    def without(self, message: int) -> "Transcript":
        """The transcript without a message and what follows it; its other versions stay."""
        tree = self.tree.without(message)
        return Transcript(tree, {at: a for at, a in self.recorded.items() if at in tree.said})

    def undone(self) -> tuple["Transcript", str]:
        """(what is left without what was done last, the user's text that is said no more). An
        answer that was generated again or edited, or a question that was edited, gives its place to
        another version of it; else the last turn goes."""
        path = self.tree.path
        for position in reversed(range(len(path))):
            if (leaf := self._before(position)) is not None:
                left = self.without(path[position].id)
                return replace(left, tree=replace(left.tree, leaf=leaf)), ""
        asked = path[self.length_before_answer() - 1]
        left, others = self.without(asked.id), self.tree.versions(asked.id)
        if len(others) == 1:
            return left, asked.content
        shown = max(at for at in others if at != asked.id)
        return replace(left, tree=left.tree.showing(shown)), ""

    def _before(self, position: int) -> int | None:
        """The last message as it was before the answer there took another one's place: of the last
        answer the newest other version; of one before, what was said alike after an older one."""
        one, *after = self.tree.path[position:]
        others = sorted((at for at in self.tree.versions(one.id) if at != one.id), reverse=True)
        if one.role != "assistant" or not others:
            return None
        if not after:
            return self.tree.showing(others[0]).leaf
        alike = (self._alike(at, after) for at in others if at < one.id)
        return next((leaf for leaf in alike if leaf), None)

    def _alike(self, leaf: int, after: Sequence[Said]) -> int:
        """The last of the messages that say the same after this one; 0 where there are none."""
        for said in after:
            then = (at for at, one in self.tree.said.items() if one.parent == leaf)
            leaf = next((at for at in then if self.tree.said[at].content == said.content), 0)
            if not leaf:
                break
        return leaf

    def message_of(self, answer: Answer) -> int | None:
        """The id of the message that an answer became."""
        return next((at for at, other in self.recorded.items() if other is answer), None)

    def version(self, position: int) -> tuple[int, int]:
        """(which version of this message is shown, from 1, and how many there are)."""
        one = self.tree.path[position].id
        versions = self.tree.versions(one)
        return versions.index(one) + 1, len(versions)

    def showing(self, position: int, version: int) -> "Transcript":
        """The transcript with another version of a message, from 1. Raises IndexError."""
        versions = self.tree.versions(self.tree.path[position].id)
        if version < 1:
            raise IndexError(version)
        return replace(self, tree=self.tree.showing(versions[version - 1]))

    def length_before_answer(self) -> int:
        """How many messages there are up to the last one of the user; 0 without one."""
        for position in range(len(self.messages) - 1, -1, -1):
            if self.messages[position]["role"] == "user":
                return position + 1
        return 0


def figures_of(answer: Answer) -> AnswerFigures | None:
    """What was measured of an answer; None before its prompt is read."""
    if (first := answer.prefilled) is None:
        return None
    counted, ratio = answer.counted, answer.speedup(answer.plain_rate)
    rates = (round(one, 2) if one else None for one in (counted.rate, counted.per_step))
    ratio = None if answer.is_plain or not ratio else round(ratio, 3)
    of = named(first.model, first.backbone)
    return AnswerFigures(of, *rates, answer.is_plain, ratio, answer.first_seconds)


def first_seconds_of(said: Said) -> float | None:
    """From asking to the first token of a stored answer; None where it was not measured."""
    return said.figures.first_seconds if said.figures else None


def pieces_of(text: str, lengths: tuple[int, ...]) -> list[tuple[str, int]]:
    """A text cut into the pieces it came in; nothing where they are not its own."""
    pieces, start = [], 0
    for tokens, length in zip(lengths[0::2], lengths[1::2], strict=False):
        pieces.append((text[start : start + length], tokens))
        start += length
    return pieces if start == len(text) else []
