"""Inputs: the one place where what a browser posted becomes values the program trusts.

Gradio enforces little on the server (ranges, choices and lengths can be posted past it), so every
event hands what it got to `checked` and goes on with the result only.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import without_broken_characters

MAX_CHARACTERS = 1_000_000
MAX_STEP = 1_000_000
MAX_STOPS = 16
MAX_TITLE = 200  # characters
ID = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)
SETTINGS = ("acceptance", "temperature", "top_p", "posterior_threshold", "posterior_alpha")
WHOLE = ("top_k", "nodes", "max_new_tokens")
OTHERS = ("drafter", "tree", "seed", "stop", "vanilla", "locked")
DRAFTERS = ("auto", "medusa", "prompt-lookup")
LABELS = {  # of the settings, as the page names them
    "acceptance": "Acceptance",
    "temperature": "Temperature",
    "top_p": "Top-p",
    "top_k": "Top-k",
    "posterior_threshold": "ε (threshold)",
    "locked": "lock δ = √ε",
    "posterior_alpha": "δ (alpha)",
    "drafter": "Drafter",
    "tree": "Tree",
    "nodes": "Nodes",
    "max_new_tokens": "Max new tokens",
    "seed": "Seed",
    "stop": "Stop strings",
}


@dataclass(frozen=True)
class Inputs:
    """What an event may use. step: None is the latest. row: of the conversation that is shown;
    version: of the message there, from 1. is_paced: whether the browser shows the answer slower
    than it comes."""

    settings: GenerationSettings
    text: str = ""
    system: str = ""
    step: int | None = None
    row: int | None = None
    version: int | None = None
    is_paced: bool = False

    @property
    def shown(self) -> str:
        """What a tab shows of the text while it waits."""
        return self.text[:200]


@dataclass(frozen=True)
class ListInputs:
    """What an event of the list of conversations may use. id: empty is none."""

    id: str = ""
    title: str = ""
    search: str = ""
    more: bool = False


def checked_list(posted: Mapping[str, object]) -> ListInputs:
    """Everything of one event of the list, checked; None counts as not posted. Raises
    UsageError."""
    found = {name: value for name, value in posted.items() if value is not None}
    id = found.get("id", "")
    if id != "" and not (isinstance(id, str) and ID.fullmatch(id)):
        raise UsageError("this conversation is not in the list: reload the page")
    title = _clean("the title", found.get("title", ""), MAX_TITLE)
    search = _clean("the search", found.get("search", ""), MAX_TITLE)
    more = _switch("more", found.get("more", False))
    return ListInputs(id, " ".join(title.split()), search.strip(), more)


def checked(posted: Mapping[str, object], trees: Sequence[str]) -> Inputs:
    """Everything of one event, checked. What was not posted keeps its default.

    trees: names of presets that may be chosen beside "auto". Raises UsageError: one line, what
    was wrong and what is allowed.
    """
    try:
        places = ("step", "row", "version")
        if unknown := set(posted) - {*SETTINGS, *WHOLE, *OTHERS, "text", "system", *places}:
            raise UsageError(f"unknown input {sorted(unknown)[0]!r}")
        return Inputs(
            settings=_settings(posted, trees),
            text=_message(posted["text"]) if "text" in posted else "",
            system=_clean("the system prompt", posted.get("system", "")).strip(),
            step=_count("step", posted.get("step")),
            row=_count("row", posted.get("row")),
            version=_count("version", posted.get("version")),
        )
    except UsageError as error:
        raise UsageError(_clean_line(_as_labelled(str(error)))) from None


def follows(epsilon: float) -> float:
    """The delta that belongs to an epsilon: its square root (Medusa, arXiv 2401.10774, 2.3.1)."""
    return min(math.sqrt(epsilon), 0.999)


def _settings(posted: Mapping[str, object], trees: Sequence[str]) -> GenerationSettings:
    values = {name: posted[name] for name in SETTINGS if name in posted}
    values |= {name: _whole(posted[name]) for name in WHOLE if name in posted}
    tree = _choice("tree", posted.get("tree", "auto"), ("auto", *trees))
    drafter = _choice("drafter", posted.get("drafter", "auto"), DRAFTERS)
    is_plain = _switch("Plain decoding", posted.get("vanilla", False))
    is_locked = _switch("the lock of delta", posted.get("locked", False))
    values |= {
        "tree": tree,
        "drafter": "none" if is_plain else None if drafter == "auto" else drafter,
        "seed": _seed(posted.get("seed", "")),
        "stop": _stops(posted.get("stop", "")),
    }
    settings = GenerationSettings(**values)  # every name of it is known
    if not is_locked:
        return settings
    return replace(settings, posterior_alpha=follows(settings.posterior_threshold))


def _choice(what: str, value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{what} is {value!r:.80}: choose one of {', '.join(allowed)}")
    return value


def _switch(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{what} is {value!r:.80}: switch it on or off")
    return value


def _stops(value: object) -> tuple[str, ...]:
    """Stop strings, one a line; an empty line is none."""
    lines = [line.rstrip("\r") for line in _clean("the stop strings", value).split("\n")]
    lines = [line for line in lines if line]
    if len(lines) > MAX_STOPS:
        raise UsageError(f"there are {len(lines)} stop strings: give at most {MAX_STOPS}")
    return tuple(lines)


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
    raise UsageError(f"seed is {str(value):.80}: give a whole number from 0, or leave it empty")


def _message(value: object) -> str:
    text = _clean("the message", value)
    if not text.strip():
        raise UsageError("the message is empty: write something first")
    return text


def _clean(what: str, value: object, most: int = MAX_CHARACTERS) -> str:
    """A text that every later layer can take: no null bytes, no halves of characters."""
    if not isinstance(value, str):
        raise UsageError(f"{what} is a {type(value).__name__}: give text")
    if len(value) > most:
        raise UsageError(f"{what} has {len(value):,} characters: give at most {most:,}")
    return without_broken_characters(value)


def _count(what: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STEP:
        raise UsageError(f"{what} is {value!r:.80}: give a whole number from 0 to {MAX_STEP}")
    return value


def _as_labelled(text: str) -> str:
    """An error line that begins with a setting's name, in the page's words."""
    name, _, rest = text.partition(" ")
    if name not in LABELS:
        return text
    return f"{LABELS[name]} {rest.replace('is None:', 'is empty:', 1)}"


def _clean_line(text: str) -> str:
    """An error line that can be shown whatever was posted."""
    line = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    return line if len(line) <= 300 else f"{line[:299]}…"
