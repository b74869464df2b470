"""StoredConversation: one conversation as the store keeps it."""

import json
import re
import time
import unicodedata
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from medusa_chat.messages import Message
from medusa_chat.runtime.message_tree import MessageTree

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
            if (found := folded(line).find(word)) >= 0:
                at = sum(end <= found for end in accumulate(len(folded(c)) for c in line))
                start = max(0, at - BEFORE)
                cut = line[start : start + AROUND].strip()
                return f"{'…' if start else ''}{cut}{'…' if start + AROUND < len(line) else ''}"
        return ""

    def merged(
        self, other: "StoredConversation", base: "StoredConversation"
    ) -> "StoredConversation":
        """This one with what another one has that `base` lacks, from which both went on."""
        changed = {
            name: getattr(self if getattr(self, name) != getattr(base, name) else other, name)
            for name in ("system", "settings", "given_title", "waiting")
        }
        tree = self.tree.merged(other.tree, base.tree)
        return replace(
            self, tree=tree, updated_at=max(self.updated_at, other.updated_at), **changed
        )

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
    return HIGH.sub(lambda found: "" if unicodedata.combining(found[0]) else found[0], marked)


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
