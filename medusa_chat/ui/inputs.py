"""Inputs: the one place where what a browser posted becomes values the program trusts.

Gradio enforces little on the server (ranges, choices and lengths can be posted past it), so every
event hands what it got to `checked` and goes on with the result only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message
from medusa_chat.prompts import without_broken_characters

MAX_CHARACTERS = 1_000_000
MAX_STEP = 1_000_000
ROLES = ("system", "user", "assistant")
SETTINGS = ("acceptance", "temperature", "posterior_threshold", "posterior_alpha")
OTHERS = ("tree", "max_new_tokens", "seed", "vanilla", "text", "system", "history", "step")


@dataclass(frozen=True)
class Inputs:
    """What an event may use. step: None is the latest. history: what goes to the model."""

    settings: GenerationSettings
    text: str = ""
    system: str = ""
    history: tuple[Message, ...] = ()
    step: int | None = None


def checked(posted: Mapping[str, object], trees: Sequence[str]) -> Inputs:
    """Everything of one event, checked. What was not posted keeps its default.

    trees: names of presets that may be chosen beside "auto". Raises UsageError: one line, what
    was wrong and what is allowed.
    """
    try:
        if unknown := set(posted) - {*SETTINGS, *OTHERS}:
            raise UsageError(f"unknown input {sorted(unknown)[0]!r}")
        return Inputs(
            settings=_settings(posted, trees),
            text=_message(posted["text"]) if "text" in posted else "",
            system=_clean("the system prompt", posted.get("system", "")).strip(),
            history=_history(posted.get("history", ())),
            step=_step(posted.get("step")),
        )
    except UsageError as error:
        raise UsageError(_clean_line(str(error))) from None


def _settings(posted: Mapping[str, object], trees: Sequence[str]) -> GenerationSettings:
    values = {name: posted[name] for name in SETTINGS if name in posted}
    tree = posted.get("tree", "auto")
    if not isinstance(tree, str) or tree not in ("auto", *trees):
        raise UsageError(f"tree is {tree!r:.80}: choose one of {', '.join(('auto', *trees))}")
    vanilla = posted.get("vanilla", False)
    if not isinstance(vanilla, bool):
        raise UsageError(f"Vanilla is {vanilla!r:.80}: switch it on or off")
    values |= {"tree": tree, "drafter": "none" if vanilla else None}
    if "max_new_tokens" in posted:
        values["max_new_tokens"] = _whole(posted["max_new_tokens"])
    values["seed"] = _seed(posted.get("seed", ""))
    return GenerationSettings.from_json(values)


def _whole(value: object) -> object:
    """A float that is a whole number becomes one: browsers know no integers."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


def _seed(value: object) -> int | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal():
        if len(value.strip()) <= 19:
            return int(value)
    raise UsageError(f"seed is {value!r:.80}: give a whole number from 0, or leave it empty")


def _message(value: object) -> str:
    text = _clean("the message", value)
    if not text.strip():
        raise UsageError("the message is empty: write something first")
    return text


def _clean(what: str, value: object) -> str:
    """A text that every later layer can take: no null bytes, no halves of characters."""
    if not isinstance(value, str):
        raise UsageError(f"{what} is a {type(value).__name__}: give a text")
    if len(value) > MAX_CHARACTERS:
        raise UsageError(f"{what} has {len(value):,} characters: give at most {MAX_CHARACTERS:,}")
    return without_broken_characters(value)


def _history(value: object) -> tuple[Message, ...]:
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"the conversation is a {type(value).__name__}: give a list of messages")
    return tuple(_entry(entry) for entry in value)


def _entry(entry: object) -> Message:
    if not isinstance(entry, dict) or set(entry) != {"role", "content"}:
        raise UsageError("a message of the conversation has a role and a content, nothing else")
    if entry["role"] not in ROLES:
        raise UsageError(f"role is {entry['role']!r:.80}: choose one of {', '.join(ROLES)}")
    return {"role": entry["role"], "content": _clean("a message", entry["content"])}


def _step(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STEP:
        raise UsageError(f"step is {value!r:.80}: give a whole number from 0 to {MAX_STEP}")
    return value


def _clean_line(text: str) -> str:
    """An error line that can be shown whatever was posted."""
    line = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    return line if len(line) <= 300 else f"{line[:299]}…"
