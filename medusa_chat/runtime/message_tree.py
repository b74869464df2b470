"""MessageTree: what was said in a conversation, every version of it, and the path that is shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from secrets import randbelow
from time import time_ns
from typing import Any, Self

from medusa_chat.decoding.reasoning import read
from medusa_chat.messages import Message
from medusa_chat.runtime.answer_figures import AnswerFigures

ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Said:
    """One message. parent: the id of the one before it, 0 for the first. note: why it was cut
    short. lengths: tokens and characters of each piece it came in, in turn. copied: the id of the
    message that it says again, whose steps are its own; 0 where it is none. figures: of the model
    that gave it. reasoning: before an answer, no part of its content."""

    id: int
    parent: int
    role: str
    content: str
    note: str = ""
    lengths: tuple[int, ...] = ()
    copied: int = 0
    figures: AnswerFigures | None = None
    reasoning: str = ""

    def to_json(self) -> dict[str, Any]:
        """The message as the store writes it."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Strictly what was written; an answer of older versions has its reasoning in its content.
        Raises ValueError, KeyError, TypeError or AttributeError."""
        lengths = tuple(values.get("lengths", ()))
        copied = values.get("copied", 0)
        numbers = (values["id"], values["parent"], *lengths, copied)
        texts = [values[name] for name in ("role", "content", "note")]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("it contains an invalid number")
        if not all(isinstance(text, str) for text in texts) or texts[0] not in ROLES:
            raise ValueError("it contains something that is not a message")
        figures = AnswerFigures.from_json(values.get("figures"))
        role, content, note = texts
        reasoning = values.get("reasoning")
        if reasoning is None and role == "assistant":
            reasoning, content = read(content)
            lengths = _without_first(lengths, len(texts[1]) - len(content))
        if not isinstance(reasoning or "", str):
            raise ValueError("it contains reasoning that is no text")
        numbers = (values["id"], values["parent"])
        return cls(*numbers, role, content, note, lengths, copied, figures, reasoning or "")


@dataclass(frozen=True)
class MessageTree:
    """Messages by id; the path from the first one to `leaf` is shown. Never changed in place.

    Messages with one parent are versions of each other: answers to one question, or questions at
    one place. An id is the time of its making in microseconds, so that two programs give none
    twice, and the order of versions is that of their making; `made` is the last one given here,
    beyond which a step by chance is made where the clock is behind it.
    """

    said: Mapping[int, Said] = field(default_factory=dict)
    leaf: int = 0
    made: int = 0

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """The tree that the store wrote. Raises ValueError where it is none."""
        try:
            messages = [Said.from_json(item) for item in values["messages"]]
            said = {message.id: message for message in messages}
            leaf, made = values["leaf"], values["made"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it lacks {error}") from error
        known = {0, *said}
        is_tree = all(one.parent < one.id and one.parent in known for one in messages)
        is_known = type(leaf) is int and leaf in known
        if not (is_tree and is_known and type(made) is int and made >= max(said, default=0)):
            raise ValueError("its messages do not form a tree")
        return cls(said, leaf, made)

    def to_json(self) -> dict[str, Any]:
        """The tree as the store writes it."""
        messages = [one.to_json() for one in self.said.values()]
        return {"leaf": self.leaf, "made": self.made, "messages": messages}

    @cached_property
    def path(self) -> tuple[Said, ...]:
        """The messages that are shown, the first one first."""
        found, at = list[Said](), self.leaf
        while at:
            found.append(self.said[at])
            at = self.said[at].parent
        return tuple(reversed(found))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages in the form that a model takes."""
        made = ({"role": one.role, "content": one.content} for one in self.path)
        thought = ({"reasoning": one.reasoning} if one.reasoning else {} for one in self.path)
        return tuple(one | more for one, more in zip(made, thought, strict=True))

    def plus(
        self,
        role: str,
        content: str,
        note: str = "",
        lengths: tuple[int, ...] = (),
        copied: int = 0,
        figures: AnswerFigures | None = None,
        reasoning: str = "",
    ) -> "MessageTree":
        """The tree with a message more, after the last shown one, beside others after that."""
        made = max(self.made + 1 + randbelow(1000), time_ns() // 1000)
        new = Said(made, self.leaf, role, content, note, lengths, copied, figures, reasoning)
        return MessageTree({**self.said, new.id: new}, new.id, new.id)

    def head(self, length: int) -> "MessageTree":
        """The first `length` messages are shown, the others stay reachable."""
        return replace(self, leaf=self.path[length - 1].id if length else 0)

    def without(self, message: int) -> "MessageTree":
        """The tree without a message and all that follows it; its other versions are kept."""
        gone = {message}
        for one in self.said.values():  # parents stand before children
            if one.parent in gone:
                gone.add(one.id)
        kept = {at: one for at, one in self.said.items() if at not in gone}
        leaf = self.said[message].parent if self.leaf in gone else self.leaf
        return replace(self, said=kept, leaf=leaf)

    def merged(self, other: "MessageTree", base: "MessageTree") -> "MessageTree":
        """The tree with what another one has made of `base`, from which both went on: all that
        either added or changed, with what it hangs on; what one removed is gone otherwise. A
        message that both changed is as it is here; where only the other moved on, its path is
        shown."""
        ours = {at: one for at, one in self.said.items() if base.said.get(at) != one}
        theirs = {at: one for at, one in other.said.items() if base.said.get(at) != one}
        every = {**base.said, **theirs, **ours}
        kept = {0, *ours, *theirs, *(self.said.keys() & other.said.keys())}
        for at in sorted(every, reverse=True):  # children before parents
            if at in kept:
                kept.add(every[at].parent)
        said = {at: every[at] for at in sorted(every) if at in kept}
        leaf = other.leaf if self.leaf == base.leaf else self.leaf
        if leaf and leaf not in said:
            leaf = self.leaf if self.leaf in said else max(said, default=0)
        return MessageTree(said, leaf, max(self.made, other.made))

    def contains(self, other: "MessageTree") -> bool:
        """Whether all that another one says is said here, at the same places."""
        told = {at: (one.parent, one.role, one.content) for at, one in self.said.items()}
        theirs = other.said.items()
        return all(told.get(at) == (one.parent, one.role, one.content) for at, one in theirs)

    def versions(self, message: int) -> tuple[int, ...]:
        """A message and its other versions, in the order of their making."""
        one = self.said[message]
        return tuple(at for at, other in self.said.items() if other.parent == one.parent)

    def showing(self, message: int) -> "MessageTree":
        """The path through this message to what came after it last."""
        leaf = message
        while later := [at for at, one in self.said.items() if one.parent == leaf]:
            leaf = later[-1]
        return replace(self, leaf=leaf)


def _without_first(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Tokens and characters of pieces, in turn, of which the first `count` characters are gone."""
    kept: list[int] = []
    for tokens, length in zip(lengths[0::2], lengths[1::2], strict=False):
        left = max(0, length - count)
        count = max(0, count - length)
        kept += [tokens, left] if left else []
    return tuple(kept)
