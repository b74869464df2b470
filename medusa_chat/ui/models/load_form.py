"""Choices: what the Models tab's boxes say, checked, and the load that comes of it. No gradio."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_chat.checkpoints.memory_needs import PRECISIONS
from medusa_chat.checkpoints.places import PATH, is_gguf_file
from medusa_chat.errors import UsageError
from medusa_chat.gguf_files import split_name
from medusa_chat.hub import is_repo_id
from medusa_chat.messages import LoadRequest

LONGEST = 500  # characters of an id or a path
AUTO = "auto"


@dataclass(frozen=True)
class LoadChoices:
    """text: search words, an id or a folder. context: tokens at most, None for as the program was
    started."""

    text: str = ""
    backbone: str | None = None
    precision: str = AUTO
    context: int | None = None

    @property
    def words(self) -> list[str]:
        return self.text.lower().split()

    @property
    def names_one(self) -> bool:
        """Whether the text is a checkpoint rather than words to search for."""
        return is_path(self.text) or ("/" in self.text and is_hub_name(self.text))


def is_path(name: str) -> bool:
    """Whether this is written as the path of a folder or a GGUF file, there or not; owner/name is
    an id, where there is no such folder."""
    return PATH.match(name) is not None or is_local(name)


def is_local(name: str) -> bool:
    """Whether this is a folder or a GGUF file of this disk that is written as one: a bare word is
    none."""
    if not name.startswith((".", "~")) and "/" not in name and "\\" not in name:
        return False
    try:
        path = Path(name).expanduser()
        return path.is_dir() or is_gguf_file(path)
    except (OSError, ValueError, RuntimeError):
        return False


def is_hub_name(name: str) -> bool:
    """Whether this can be a repo of the Hub, or a GGUF file in one, and is nothing on this disk."""
    return is_repo_id(split_name(name)[0]) and not is_local(name)


def choices_of(text: object, backbone: object, precision: object, context: object) -> LoadChoices:
    """What was posted while somebody types: wrong values are as if they were not there."""
    line, base = (_unquoted(typed) if _is_line(typed) else "" for typed in (text, backbone))
    known = str(precision) if precision in PRECISIONS else AUTO
    return LoadChoices(" ".join(line.split()), base or None, known, _tokens(context))


def request_of(
    name: object, posted: Sequence[object], start: LoadRequest, longest: int | None = None
) -> LoadRequest:
    """What to load. posted: backbone, precision and context. start: what the program was started
    with: its device, its limits. longest: tokens that the model can read. Raises UsageError."""
    backbone, precision, context = posted
    if not _is_line(name) or not str(name).strip():
        raise UsageError("choose a checkpoint: a Hub id, a folder or a GGUF file")
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r:.40}: choose one of {', '.join(PRECISIONS)}")
    if not _is_line(backbone):
        raise UsageError(
            "the backbone is no Hub id, folder or GGUF file: correct it, or leave it empty"
        )
    tokens = start.max_context if context == AUTO else _tokens(context)
    if context != AUTO and tokens is None:
        raise UsageError(f"context is {context!r:.40}: give a whole number of tokens from 16")
    return LoadRequest(
        checkpoint=_unquoted(name),
        backbone=_unquoted(backbone) or None,
        precision=str(precision),
        device=start.device,
        max_context=min(tokens, longest) if tokens and longest else tokens,
        offline=start.offline,
        drafts=start.drafts if _unquoted(name) == start.checkpoint else (),
    )


def _unquoted(value: object) -> str:
    """A line without the quotes in which Windows copies a path."""
    line = str(value).strip()
    is_quoted = len(line) > 1 and line[0] == line[-1] and line[0] in "\"'"
    return line[1:-1].strip() if is_quoted else line


def _is_line(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST and value.isprintable()


def _tokens(value: object) -> int | None:
    text = str(value)
    is_count = text.isascii() and text.isdecimal() and len(text) < 8 and int(text) >= 16
    return int(text) if is_count else None
