"""SavedFile: a conversation as a Markdown file that its reader keeps. No gradio."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from medusa_chat.runtime.stored_conversation import StoredConversation

SPEAKERS = {"user": "You", "assistant": "medusa-chat"}
NAME = re.compile(r"[^\w ().,-]+")  # what no file's name has on every system
LONGEST_NAME = 60  # characters


class SavedFile(NamedTuple):
    """name: of the file, with its ending; text: all of it, UTF-8."""

    name: str
    text: str

    @classmethod
    def of(cls, kept: StoredConversation) -> "SavedFile":
        """The messages that are shown, whole and as they were written."""
        name = " ".join(NAME.sub(" ", kept.title).split())[:LONGEST_NAME].strip(" .")
        return cls(f"{name or 'conversation'}.md", "\n\n".join(_parts(kept)) + "\n")


def _parts(kept: StoredConversation) -> Iterator[str]:
    yield f"# {' '.join(kept.title.split())}"
    if kept.system:
        yield f"## System prompt\n\n{kept.system}"
    for one in kept.tree.path:
        thought = "".join(f"> {line}\n" for line in one.reasoning.splitlines())
        yield f"## {SPEAKERS[one.role]}\n\n{thought}{thought and chr(10)}{one.content}"
        if one.note:
            yield f"*{one.note}*"
        if one.figures:
            yield f"*{one.figures.line}*"
