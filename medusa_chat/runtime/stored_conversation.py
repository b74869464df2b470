"""StoredConversation: one conversation as the store keeps it."""

import json
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from medusa_chat.messages import Message
from medusa_chat.runtime.message_tree import MessageTree

MAX_TITLE = 80  # characters


class Listed(NamedTuple):
    """A conversation in a list."""

    id: str
    title: str
    updated_at: float


@dataclass(frozen=True)
class StoredConversation:
    """One conversation. given_title: by its owner, empty while the first message is its title.
    settings: of its next answer, by name, as the page posts them. system: its prompt."""

    tree: MessageTree = field(default_factory=MessageTree)
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    given_title: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0

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
        said = (one.content for one in self.tree.said.values())
        return "\n".join((self.title, *said)).casefold()

    def merged(
        self, other: "StoredConversation", base: "StoredConversation"
    ) -> "StoredConversation":
        """This one with what another one has that `base` lacks, from which both went on."""
        changed = {
            name: getattr(self if getattr(self, name) != getattr(base, name) else other, name)
            for name in ("system", "settings", "given_title")
        }
        tree = self.tree.merged(other.tree, base.tree)
        return replace(
            self, tree=tree, updated_at=max(self.updated_at, other.updated_at), **changed
        )

    def to_line(self) -> str:
        """JSON, without the times."""
        body = {"system": self.system, "settings": self.settings, "title": self.given_title}
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
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it lacks {error}") from error
        if [type(value) for value in kept] != [str, dict, str]:
            raise ValueError("it contains something that is not a conversation")
        return cls(tree, *kept, created_at, updated_at)


def title_of(tree: MessageTree) -> str:
    """A conversation's title while it was given none: the first line of the first message."""
    first = next(iter((*tree.path, *tree.said.values())), None)
    lines = first.content.split("\n") if first else []
    title = next((" ".join(line.split()) for line in lines if line.strip()), "")
    return title if len(title) <= MAX_TITLE else f"{title[: MAX_TITLE - 1]}…"
