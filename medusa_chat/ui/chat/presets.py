"""The presets of the Settings drawer: as settings of the page, and what is done with them there."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr

from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.runtime.presets import (
    Preset,
    delete_preset,
    load_preset,
    own_names,
    preset_names,
    save_preset,
    shipped_names,
)
from medusa_chat.ui.access.guard import is_guest
from medusa_chat.ui.access.notices import inform, warn
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.settings_panel import SettingsPanel
from medusa_chat.ui.chat.view import View
from medusa_chat.ui.page.html_blocks import AT_ONCE, event_field
from medusa_chat.ui.page.inputs import Inputs, Posted, checked, follows, refusal
from medusa_chat.ui.page.tree_view import to_line

SAME = 5e-4  # between two deltas: the page shows three digits
NOT_YOURS = "Presets are kept by the person who shared this page."
Act = Callable[[Posted, gr.EventData, gr.Request], list[Any]]


def offered(is_guest: bool) -> tuple[str, ...]:
    """Names of the presets that somebody may pick: the owner's own are not for guests."""
    return shipped_names() if is_guest else preset_names()


def chosen(name: object, is_guest: bool) -> Preset:
    """A preset that was picked. Raises UsageError."""
    if not name:
        raise UsageError("pick a preset first")
    if not isinstance(name, str) or name not in offered(is_guest):
        raise UsageError(f"there is no preset {name!r:.80}: pick one of the list")
    return load_preset(name, ships=is_guest)


def settings_of(preset: Preset, base: Mapping[str, Any], trees: Sequence[str]) -> dict[str, Any]:
    """The settings that a page shows, by name, with "vanilla" for plain decoding. base: those that
    the preset does not name. Raises UsageError for what the page cannot show."""
    told = preset.settings
    values = {**base, **told}
    if "drafter" in told:
        is_plain = told["drafter"] == "none"
        values["drafter"] = "auto" if is_plain or told["drafter"] is None else told["drafter"]
        values["vanilla"] = is_plain
    if told.get("seed") is not None:
        values["seed"] = str(told["seed"])
    stops = told.get("stop", ())
    if any("\n" in text or "\r" in text for text in stops):
        raise UsageError(f"preset {preset.name}: no stop string on the page has a line break")
    if "stop" in told:
        values["stop"] = "\n".join(stops)
    if {"posterior_threshold", "posterior_alpha"} & told.keys():
        delta = follows(values["posterior_threshold"])
        values["locked"] = abs(values["posterior_alpha"] - delta) < SAME
    for name, value in values.items():
        if name != "vanilla" and (wrong := refusal(name, value, trees)):
            raise UsageError(f"preset {preset.name}: {wrong}")
    return values


def preset_of(name: object, inputs: Inputs) -> Preset:
    """A preset of the settings that a page shows. Raises UsageError."""
    if not isinstance(name, str) or not name.strip():
        raise UsageError("give the preset a name: letters, digits, spaces, dots and hyphens")
    return Preset.of(" ".join(name.split()), inputs.settings, inputs.system)


def is_own(name: str) -> bool:
    """Whether a preset is one of the user's own, which can be deleted."""
    return name in own_names()


class PresetEvents:
    """What the events of the presets do; each returns an update for each of `outputs`."""

    def __init__(
        self,
        controller: ChatController,
        tab: gr.State,
        parts: Mapping[str, Any],
        panel: SettingsPanel,
    ) -> None:
        self.controller, self.tab, self.panel = controller, tab, panel
        self.vanilla, self.own = panel.components["vanilla"], panel.presets
        view = [parts[name] for name in View._fields]
        self.outputs = [*view, *panel.outputs, self.vanilla, self.own.name, self.own.files]

    def connect(self) -> None:
        """Connect the events."""
        made, own = self.panel.components.values(), self.own
        posted = {self.tab, self.panel.origin, *made, own.choice, own.name}
        for event, act in (
            (own.choice.input, self.pick),
            (own.save.click, self.save),
            (own.name.submit, self.save),
            (own.files.take_preset, self.take),
            (own.files.drop_preset, self.drop),
            (own.files.give_preset, self.give),
        ):
            event(self._refusing(act), posted, self.outputs, **AT_ONCE)

    def pick(self, posted: Posted, event: gr.EventData, request: gr.Request) -> list[Any]:
        """Use the preset that was picked, or none: then the settings stay."""
        name = posted[self.own.choice] or ""
        preset = chosen(name, is_guest(request)) if name else None
        return self._shown(posted, preset, request)

    def save(self, posted: Posted, event: gr.EventData, request: gr.Request) -> list[Any]:
        """Save the settings that are shown, and the system prompt."""
        inputs = checked(self.panel.named(posted), self.panel.trees)
        return self._keep(posted, preset_of(posted[self.own.name], inputs), request)

    def take(self, posted: Posted, event: gr.EventData, request: gr.Request) -> list[Any]:
        """Take in a preset's file: its name, without the ending, and its text."""
        _require_owner(request)
        name, text = event_field(event, "name"), event_field(event, "text")
        if not isinstance(name, str) or not isinstance(text, str):
            raise UsageError("choose a preset's TOML file")
        return self._keep(posted, Preset.read(name, text), request)

    def drop(self, posted: Posted, event: gr.EventData, request: gr.Request) -> list[Any]:
        """Delete the preset that is picked: the page has asked for a second click."""
        _require_owner(request)
        self.controller.writable(posted[self.tab])  # or nothing is deleted
        delete_preset(str(posted[self.own.choice] or ""))
        return self._shown(posted, None, request)

    def give(self, posted: Posted, event: gr.EventData, request: gr.Request) -> list[Any]:
        """The file of the preset that is picked, for the browser to keep."""
        preset = chosen(posted[self.own.choice], is_guest(request))
        line = files_line(preset.name, is_guest(request), preset.to_toml())
        return [*(gr.skip() for _ in self.outputs[:-1]), line]

    def _keep(self, posted: Posted, preset: Preset, request: gr.Request) -> list[Any]:
        """Save a preset that the page can show, and use it."""
        _require_owner(request)
        self.controller.writable(posted[self.tab])  # or nothing is saved
        settings_of(preset, self.panel.base, self.panel.trees)
        before = is_own(preset.name)
        save_preset(preset)
        inform(f"The preset {preset.name} is {'replaced' if before else 'saved'}.")
        return self._shown(posted, preset, request)

    def _shown(self, posted: Posted, preset: Preset | None, request: gr.Request) -> list[Any]:
        """Use a preset in the conversation, or none."""
        tab, panel = posted[self.tab], self.panel
        chat = self.controller.writable(tab)
        name = preset.name if preset else ""
        kept, is_plain = {**panel.kept(posted), "preset": name}, posted[self.vanilla] is True
        if preset is not None:
            values = settings_of(preset, panel.base, panel.trees)
            is_plain = values.pop("vanilla", is_plain)
            kept = {**values, "model": kept["model"], "preset": name}
            if preset.system or chat.is_empty:
                chat.set_system(preset.system)
        chat.set_settings(kept)
        by, tab.list_version = is_guest(request), -1  # the list's line names the preset
        shown = panel.shown(is_plain, kept, offered(by))
        return [*self.controller.refresh(tab), *shown, is_plain, "", files_line(name, by)]

    def _refusing(self, act: Act) -> Act:
        """The same; what is refused changes nothing but says why."""

        def handle(posted: Posted, event: gr.EventData, request: gr.Request) -> list[Any]:
            try:
                return act(posted, event, request)
            except MedusaChatError as error:
                warn(str(error))
                return [gr.skip() for _ in self.outputs]

        return handle


def files_line(name: str, is_for_guest: bool, text: str = "") -> str:
    """JSON for presets.js: the names of the user's own presets, which can be deleted, and whether
    files are taken in; guests have neither. name, text: of a preset's file, to be saved now."""
    own = () if is_for_guest else own_names()
    line = {"own": list(own), "takes": not is_for_guest, "name": name, "text": text}
    return to_line({**line, "at": time.time()})


def _require_owner(request: gr.Request) -> None:
    if is_guest(request):
        raise UsageError(NOT_YOURS)
