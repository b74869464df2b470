"""StoredConversation: a conversation with every version of its messages, as it is stored."""

import json
import re
import time
import unicodedata
from bisect import bisect_left, bisect_right
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
    """One message. parent: the id of the previous message, 0 for the first. note: why it was cut
    short. lengths: tokens and characters of each piece that it came in, alternating. copied: the id
    of the message that it repeats, whose steps are also its own; 0 otherwise. figures: which model
    gave it, and how fast. reasoning: what came before the answer; not part of its content."""

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
        """Read what was written, strictly; an answer from older versions has its reasoning in its
        content. Raises ValueError, KeyError, TypeError or AttributeError."""
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
            lengths = _cut_start(lengths, len(texts[1]) - len(content))
        if not isinstance(reasoning or "", str):
            raise ValueError("it contains reasoning that is not text")
        numbers = (values["id"], values["parent"])
        return cls(*numbers, role, content, note, lengths, copied, figures, reasoning or "")


@dataclass(frozen=True)
class MessageTree:
    """Messages by id; the path from the first one to `leaf` is shown. Immutable.

    Messages with the same parent are versions of each other: answers to one question, or questions
    at one place. An id is the time of the message in microseconds, so ids of two data folders
    rarely collide and versions are ordered by age. `made` is the latest id; the next one is larger
    even if the clock was set back.
    """

    said: Mapping[int, Said] = field(default_factory=dict)
    leaf: int = 0
    made: int = 0

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """The tree that the store wrote. Raises ValueError for anything else."""
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
        """The shown messages, in order."""
        messages, at = list[Said](), self.leaf
        while at:
            messages.append(self.said[at])
            at = self.said[at].parent
        return tuple(reversed(messages))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The shown messages in the form that models take."""
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
        """The tree with one more message after the last shown one, beside its other successors."""
        made = max(self.made + 1, time_ns() // 1000)
        new = Said(made, self.leaf, role, content, note, lengths, copied, figures, reasoning)
        return MessageTree({**self.said, new.id: new}, new.id, new.id)

    def head(self, length: int) -> "MessageTree":
        """The tree that shows the first `length` messages; the others stay in it."""
        return replace(self, leaf=self.path[length - 1].id if length else 0)

    def without(self, message: int) -> "MessageTree":
        """The tree without a message and all that follow it; its other versions stay."""
        gone = {message}
        for one in self.said.values():  # parents come before children
            if one.parent in gone:
                gone.add(one.id)
        kept = {at: one for at, one in self.said.items() if at not in gone}
        leaf = self.said[message].parent if self.leaf in gone else self.leaf
        return replace(self, said=kept, leaf=leaf)

    def contains(self, other: "MessageTree") -> bool:
        """Whether this tree has all messages of another one, at the same places."""
        told = {at: (one.parent, one.role, one.content) for at, one in self.said.items()}
        theirs = other.said.items()
        return all(told.get(at) == (one.parent, one.role, one.content) for at, one in theirs)

    def versions(self, message: int) -> tuple[int, ...]:
        """A message and its other versions, in order of creation."""
        one = self.said[message]
        return tuple(at for at, other in self.said.items() if other.parent == one.parent)

    def showing(self, message: int) -> "MessageTree":
        """The tree that shows the path through this message to its latest successor."""
        leaf = message
        while later := [at for at, one in self.said.items() if one.parent == leaf]:
            leaf = later[-1]
        return replace(self, leaf=leaf)


def _cut_start(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Tokens and characters of pieces, alternating, after removing the first `count` characters."""
    kept: list[int] = []
    for tokens, length in zip(lengths[0::2], lengths[1::2], strict=False):
        left = max(0, length - count)
        count = max(0, count - length)
        kept += [tokens, left] if left else []
    return tuple(kept)


MAX_TITLE = 80  # characters
HIGH = re.compile(r"[^\x00-\u02ff]")  # combining marks are above this range
BEFORE, AROUND = 30, 140  # characters of an excerpt: before the match, and in all, about
PIN = '{"pinned": true, '  # what the line of a pinned conversation begins with


class Listed(NamedTuple):
    """A conversation in a list. excerpt: the text around a match outside the title."""

    id: str
    title: str
    updated_at: float
    excerpt: str = ""
    is_pinned: bool = False


class Binned(NamedTuple):
    """A conversation in the bin. until: Unix time when it is removed."""

    id: str
    title: str
    until: float


@dataclass(frozen=True)
class StoredConversation:
    """One conversation. given_title: the owner's title, empty if the first message is the title.
    settings: of its next answer, by name, as the page posts them. system: the system prompt.
    waiting: text that was sent and is not yet a message. is_pinned: it stands first in the list."""

    tree: MessageTree = field(default_factory=MessageTree)
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    given_title: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0
    waiting: str = ""
    is_pinned: bool = False

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
        """The text around the first match of a search word that the title does not contain; empty
        if there is none."""
        said = self.tree.said.values()
        title, lines = folded(self.title), (t for one in said for t in (one.content, one.reasoning))
        word = next((word for word in folded(search).split() if word not in title), "")
        for line in (line for text in lines for line in text.splitlines() if word):
            if (place := folded(line).find(word)) >= 0:
                return excerpt_around(line, _unfolded(line, place))
        return ""

    def branch(self, length: int) -> "StoredConversation":
        """A new conversation from the first `length` shown messages."""
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
            is_pinned=False,
        )

    def to_line(self) -> str:
        """JSON, without the times."""
        body: dict[str, Any] = {"pinned": True} if self.is_pinned else {}
        body |= {"system": self.system, "settings": self.settings, "title": self.given_title}
        body |= {"waiting": self.waiting} if self.waiting else {}
        return json.dumps({**body, **self.tree.to_json()}, ensure_ascii=False)

    @classmethod
    def from_line(
        cls, line: str, created_at: float = 0.0, updated_at: float = 0.0
    ) -> "StoredConversation":
        """Read what was written, strictly; raises ValueError for anything else."""
        try:
            body = json.loads(line)
            tree = MessageTree.from_json(body)
            kept = (body["system"], body["settings"], body["title"])
            waiting = body.get("waiting", "")
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it lacks {error}") from error
        if [type(value) for value in (*kept, waiting)] != [str, dict, str, str]:
            raise ValueError("it contains something that is not a conversation")
        is_pinned = body.get("pinned") is True
        return cls(tree, *kept, created_at, updated_at, waiting, is_pinned)


def title_of(tree: MessageTree) -> str:
    """The default title of a conversation: the first line of its first message."""
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


def _unfolded(line: str, place: int) -> int:
    """Where in a line the character stands that is at this place of the folded line."""
    return sum(end <= place for end in accumulate(len(folded(c)) for c in line))


def excerpt_around(line: str, at: int) -> str:
    """Some words of a line around a place in it, whole ones where they are short."""
    start, end = max(0, at - BEFORE), min(len(line), max(0, at - BEFORE) + AROUND)
    if start and (space := line.find(" ", start, at)) >= 0:
        start = space + 1
    if end < len(line) and (space := line.rfind(" ", at, end)) > at + BEFORE:
        end = space
    return f"{'…' if start else ''}{line[start:end].strip()}{'…' if end < len(line) else ''}"


def marked(text: str, search: str) -> list[str]:
    """The text in pieces, alternately without and with a word of the search, as `holds` finds it:
    ["Rain ", "clouds", " grow"]."""
    words, plain = sorted(folded(search).split(), key=len, reverse=True), folded(text)
    if not words:
        return [text]
    ends = [0, *accumulate(len(folded(character)) for character in text)]
    pieces, done = [""], 0
    for found in re.finditer("|".join(map(re.escape, words)), plain):
        begin = bisect_right(ends, found.start()) - 1
        end = bisect_left(ends, found.end())
        if begin >= done and end > begin:
            pieces[-1:] = [text[done:begin], text[begin:end], ""]
            done = end
    return [*pieces[:-1], text[done:]]


def holds(words: str, search: str) -> bool:
    """Whether the searchable text contains all words of a search."""
    wanted = folded(search).split()
    text = folded(words) if wanted else ""
    return all(word in text for word in wanted)


def excerpt_of(line: str, search: str) -> str:
    """StoredConversation.excerpt of a line on disk; empty for an unreadable one."""
    try:
        return StoredConversation.from_line(line).excerpt(search) if search else ""
    except ValueError:
        return ""
