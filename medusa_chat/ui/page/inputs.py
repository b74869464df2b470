"""Inputs: the one place where what a browser posted becomes values the program trusts.

Gradio enforces little on the server (ranges, choices and lengths can be posted past it), so every
event hands what it got to `checked`, or to a SettingsForm that does, and goes on with the result
only.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.messages import without_broken_characters
from medusa_chat.ui.page.html_blocks import event_field

MAX_CHARACTERS = 1_000_000
MAX_NUMBER = 1_000_000
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 10_000
MAX_TITLE = 200  # characters
ID = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SETTINGS = (
    *("acceptance", "temperature", "top_p", "min_p", *PENALTIES),
    *("posterior_threshold", "posterior_alpha"),
)
WHOLE = ("top_k", "nodes", "max_new_tokens")
OTHERS = ("drafter", "against", "tree", "seed", "stop", "vanilla", "locked")
PLACE = ("step", "node", "token")  # see Inputs
DRAFTERS = tuple(name for name in kinds.NAMES if name != kinds.NONE.name)
SIDES = (kinds.NONE.name, *DRAFTERS)  # what a race may be against
LABELS = {  # of the settings, as the page names them
    "acceptance": "Acceptance",
    "temperature": "Temperature",
    "top_p": "Top-p",
    "top_k": "Top-k",
    "min_p": "Min-p",
    "repetition_penalty": "Repetition penalty",
    "presence_penalty": "Presence penalty",
    "frequency_penalty": "Frequency penalty",
    "posterior_threshold": "ε (threshold)",
    "locked": "lock δ = √ε",
    "posterior_alpha": "δ (alpha)",
    "drafter": "Drafter",
    "against": "Against",
    "tree": "Tree",
    "nodes": "Nodes",
    "max_new_tokens": "Max new tokens",
    "seed": "Seed",
    "stop": "Stop strings",
}
Posted = Mapping[gr.components.Component, Any]  # what an event posted, by component
Act = Callable[[Any, "Inputs"], Any]
Refuse = Callable[[Any, MedusaChatError], Any]


@dataclass(frozen=True)
class Inputs:
    """What an event may use. row: of the conversation that is shown. place: a token of a recorded
    step, as (step, node, token). is_paced: whether the browser shows the answer slower than it
    comes. against: the drafter of the other side of a race."""

    settings: GenerationSettings
    text: str = ""
    system: str = ""
    row: int | None = None
    place: tuple[int, int, int] | None = None
    is_paced: bool = False
    against: str = kinds.NONE.name

    @property
    def overhead(self) -> int:
        """Characters that are kept of it beside the text."""
        return len(self.system) + sum(map(len, self.settings.stop))

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
    given = {name: value for name, value in posted.items() if value is not None}
    id = given.get("id", "")
    if id != "" and not (isinstance(id, str) and ID.fullmatch(id)):
        raise UsageError("this conversation is not in the list: reload the page")
    title = clean("the title", given.get("title", ""), MAX_TITLE)
    search = clean("the search", given.get("search", ""), MAX_TITLE)
    more = _switch("more", given.get("more", False))
    return ListInputs(id, " ".join(title.split()), search.strip(), more)


def checked(posted: Mapping[str, object], trees: Sequence[str]) -> Inputs:
    """Everything of one event, checked. What was not posted keeps its default.

    trees: names of presets that may be chosen beside "auto". Raises UsageError: one line, what
    was wrong and what is allowed.
    """
    try:
        if unknown := set(posted) - {*SETTINGS, *WHOLE, *OTHERS, *PLACE, "text", "system", "row"}:
            raise UsageError(f"unknown input {sorted(unknown)[0]!r}")
        return Inputs(
            settings=_settings(posted, trees),
            text=_message(posted["text"]) if "text" in posted else "",
            system=clean("the system prompt", posted.get("system", "")).strip(),
            row=_row(posted.get("row")),
            against=one_of("against", posted.get("against", SIDES[0]), SIDES),
            place=_place(posted),
        )
    except UsageError as error:
        raise UsageError(_clean_line(_as_labelled(str(error)))) from None


def from_browser(line: object) -> dict[str, Any]:
    """The JSON object that a browser keeps or shows; {} for anything else."""
    try:
        values = json.loads(line) if isinstance(line, str) else None
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def whole_number(value: object) -> int | None:
    """A place or a number that was posted; None for anything but a whole number from 0."""
    return value if type(value) is int and 0 <= value <= MAX_NUMBER else None


def follows(epsilon: float) -> float:
    """The delta that belongs to an epsilon: its square root (Medusa, arXiv 2401.10774, 2.3.1)."""
    return min(math.sqrt(epsilon), 0.999)


def _settings(posted: Mapping[str, object], trees: Sequence[str]) -> GenerationSettings:
    values = {name: posted[name] for name in SETTINGS if name in posted}
    values |= {name: _whole(posted[name]) for name in WHOLE if name in posted}
    tree = one_of("tree", posted.get("tree", "auto"), ("auto", *trees))
    drafter = one_of("drafter", posted.get("drafter", "auto"), DRAFTERS)
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


def one_of(what: str, value: object, allowed: Sequence[str]) -> str:
    """A choice that was posted. Raises UsageError."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{what} is {value!r:.80}: choose one of {', '.join(allowed)}")
    return value


def _switch(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{what} is {value!r:.80}: switch it on or off")
    return value


def _stops(value: object) -> tuple[str, ...]:
    """Stop strings, one a line; an empty line is none. Blanks alone are refused: they end nearly
    every answer after a word, and nobody sees them in the field."""
    text = clean("the stop strings", value, MAX_STOP_CHARACTERS)
    lines = [line for raw in text.split("\n") if (line := raw.rstrip("\r"))]
    for place, line in enumerate(lines, 1):
        if line.isspace():
            raise UsageError(f"stop string {place} is only blanks: write a text, or remove it")
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
    text = clean("the message", value)
    if not text.strip():
        raise UsageError("the message is empty: write something first")
    return text


def clean(what: str, value: object, most: int = MAX_CHARACTERS) -> str:
    """A text that every later layer can take: no null bytes, no halves of characters."""
    if not isinstance(value, str):
        raise UsageError(f"{what} is a {type(value).__name__}: give text")
    if len(value) > most:
        raise UsageError(f"{what} has {len(value):,} characters: give at most {most:,}")
    return without_broken_characters(value)


def _place(posted: Mapping[str, Any]) -> tuple[int, int, int] | None:
    if not any(name in posted for name in PLACE):
        return None
    step, node, token = (whole_number(posted.get(name)) for name in PLACE)
    if step is None or node is None or token is None:
        raise UsageError("this step has no such node: choose another")
    return step, node, token


def _row(value: object) -> int | None:
    row = whole_number(value)
    if row is None and value is not None:
        raise UsageError(f"row is {value!r:.80}: give a whole number from 0 to {MAX_NUMBER}")
    return row


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


@dataclass(frozen=True)
class SettingsForm:
    """The components of the settings by name, and what reads what they posted.

    trees: names of presets that may be chosen beside "auto". defaults: of what a browser keeps.
    """

    components: Mapping[str, gr.components.Component]
    trees: Sequence[str]
    defaults: Mapping[str, Any]

    def handler(
        self, act: Act, refuse: Refuse, tab: gr.State, **sources: gr.components.Component | str
    ) -> Callable[[Posted, gr.EventData], Any]:
        """What an event that decodes runs: `act` gets the tab and its checked inputs, `refuse` the
        tab and the UsageError of what was posted. sources: where an input that is no setting
        comes from: a component, or the name of a field of the event."""

        def handle(posted: Posted, event: gr.EventData) -> Any:
            fields = {
                name: event_field(event, source) if isinstance(source, str) else posted[source]
                for name, source in sources.items()
            }
            try:
                inputs = checked(self.named(posted) | fields, self.trees)
            except MedusaChatError as error:
                return refuse(posted[tab], error)
            return act(posted[tab], inputs)

        return handle

    @property
    def base(self) -> dict[str, Any]:
        """The value that a setting has where none is given."""
        return dict(self.defaults)

    def named(self, posted: Posted) -> dict[str, object]:
        """The posted values, by the settings' names."""
        return {name: posted[made] for name, made in self.components.items() if made in posted}

    def valid(self, posted: Posted) -> dict[str, Any]:
        """The settings that were posted, a default where one is wrong."""
        return self.restored(self.named(posted))

    def restored(self, stored: object) -> dict[str, Any]:
        """Settings of a conversation, or what a browser remembered as JSON, each value checked; a
        default where one is missing or wrong."""
        values = self.base
        for name, value in (stored if isinstance(stored, dict) else from_browser(stored)).items():
            if name in values and not refusal(name, value, self.trees):
                values[name] = value
        return values


def touched(component: Any) -> list[Any]:
    """The events of a value that a person changes. Gradio's text box tells `input` for a key that
    writes a character, not for Backspace, a paste or a drop: leaving the field tells those."""
    is_text = isinstance(component, gr.Textbox)
    return [component.input, component.blur] if is_text else [component.input]


def refusal(name: str, value: object, trees: Sequence[str]) -> str:
    """Why a setting cannot have this value; empty where it can."""
    try:
        checked({name: value}, trees)
    except MedusaChatError as error:
        return str(error)
    return ""
