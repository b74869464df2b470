"""StoredConversation: a conversation as it is kept, with every version of its messages."""

import json
import re
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from time import time_ns
from typing import Any, NamedTuple, Self

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
    one place. An id is the time of the message in microseconds, so that ids of two data folders
    rarely collide and versions are ordered by age; `made` is the latest one, which the next exceeds
    even where the clock was set back.
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
        messages, at = list[Said](), self.leaf
        while at:
            messages.append(self.said[at])
            at = self.said[at].parent
        return tuple(reversed(messages))

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
        made = max(self.made + 1, time_ns() // 1000)
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


MAX_TITLE = 80  # characters
HIGH = re.compile(r"[^\x00-\u02ff]")  # below it stands no mark of a letter
BEFORE, AROUND = 24, 120  # characters of an excerpt: before what was found, and all


class Listed(NamedTuple):
    """A conversation in a list. excerpt: where a search was found beside the title."""

    id: str
    title: str
    updated_at: float
    excerpt: str = ""


@dataclass(frozen=True)
class StoredConversation:
    """One conversation. given_title: by its owner, empty while the first message is its title.
    settings: of its next answer, by name, as the page posts them. system: its prompt. waiting:
    what was sent and is not said yet."""

    tree: MessageTree = field(default_factory=MessageTree)
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    given_title: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0
    waiting: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the shown branch."""
        return self.tree.messages

    @property
    def title(self) -> str:
        """The title in the list of conversations."""
        return self.given_title or title_of(self.tree)

    @property
    def words(self) -> str:
        """The searchable text: the title and all versions of all messages."""
        said = (text for one in self.tree.said.values() for text in (one.content, one.reasoning))
        return "\n".join((self.title, *said)).casefold()

    def excerpt(self, search: str) -> str:
        """What a message says around the first word of a search that the title lacks; empty where
        there is none."""
        said = self.tree.said.values()
        title, lines = folded(self.title), (t for one in said for t in (one.content, one.reasoning))
        word = next((word for word in folded(search).split() if word not in title), "")
        for line in (line for text in lines for line in text.splitlines() if word):
            if (place := folded(line).find(word)) >= 0:
                at = sum(end <= place for end in accumulate(len(folded(c)) for c in line))
                start = max(0, at - BEFORE)
                cut = line[start : start + AROUND].strip()
                return f"{'…' if start else ''}{cut}{'…' if start + AROUND < len(line) else ''}"
        return ""

    def branch(self, length: int) -> "StoredConversation":
        """A conversation of its own, of the first so many messages that are shown."""
        path = self.tree.path[:length]
        tree = MessageTree({one.id: one for one in path}, path[-1].id, self.tree.made)
        now = time.time()
        return replace(
            self,
            tree=tree,
            given_title=f"{self.title[:MAX_TITLE]} (branch)",
            created_at=now,
            updated_at=now,
            waiting="",
        )

    def to_line(self) -> str:
        """JSON, without the times."""
        body = {"system": self.system, "settings": self.settings, "title": self.given_title}
        body |= {"waiting": self.waiting} if self.waiting else {}
        return json.dumps({**body, **self.tree.to_json()}, ensure_ascii=False)

    @classmethod
    def from_line(
        cls, line: str, created_at: float = 0.0, updated_at: float = 0.0
    ) -> "StoredConversation":
        """Strictly what was written; raises ValueError for anything else."""
        try:
            body = json.loads(line)
            tree = MessageTree.from_json(body)
            kept = (body["system"], body["settings"], body["title"])
            waiting = body.get("waiting", "")
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it lacks {error}") from error
        if [type(value) for value in (*kept, waiting)] != [str, dict, str, str]:
            raise ValueError("it contains something that is not a conversation")
        return cls(tree, *kept, created_at, updated_at, waiting)


def title_of(tree: MessageTree) -> str:
    """A conversation's title while it was given none: the first line of the first message."""
    first = next(iter((*tree.path, *tree.said.values())), None)
    lines = first.content.split("\n") if first else []
    title = next((" ".join(line.split()) for line in lines if line.strip()), "")
    return title if len(title) <= MAX_TITLE else f"{title[: MAX_TITLE - 1]}…"


def folded(text: str) -> str:
    """The text without case, accents and other marks on its letters."""
    if text.isascii():
        return text.lower()
    marked = unicodedata.normalize("NFKD", text.casefold())
    return HIGH.sub(lambda match: "" if unicodedata.combining(match[0]) else match[0], marked)


def holds(words: str, search: str) -> bool:
    """Whether all words of a search stand anywhere in the searchable text."""
    wanted = folded(search).split()
    text = folded(words) if wanted else ""
    return all(word in text for word in wanted)


def excerpt_of(line: str, search: str) -> str:
    """StoredConversation.excerpt of a line on disk; empty for one that cannot be read."""
    try:
        return StoredConversation.from_line(line).excerpt(search) if search else ""
    except ValueError:
        return ""
