"""SettingsPanel: the settings of the Chat tab, and what a browser remembers of them."""

import json
from collections.abc import Sequence
from typing import Any

import gradio as gr

from medusa_chat.errors import MedusaChatError
from medusa_chat.ui.chat.setting_components import DEFAULTS, build_components, updates
from medusa_chat.ui.page.html_blocks import AT_ONCE, from_browser, page, script_block
from medusa_chat.ui.page.inputs import checked
from medusa_chat.ui.page.settings_form import Posted, SettingsForm
from medusa_chat.ui.page.tree_view import to_line


class SettingsPanel(SettingsForm):
    """The chat's settings: all there are, remembered by the browser."""

    def remember(self, posted: Posted) -> list[Any]:
        """(what the browser shall keep, an update per setting): vanilla is for now, never for the
        next visit. Values stay as they are but for a delta that follows epsilon."""
        values = self.named(posted)
        valid = restored(values, self.trees)
        shown = {**valid, "vanilla": values["vanilla"] is True}
        changes = updates(shown)
        for change, name in zip(changes, DEFAULTS, strict=True):
            if name != "posterior_alpha" or not shown["locked"]:
                change.pop("value")
        return [to_line(valid), *changes]

    def restore(self, is_plain: object, line: object) -> list[Any]:
        """An update per setting, from the JSON line that a browser kept."""
        return updates({**restored(_read(line), self.trees), "vanilla": is_plain is True})


def build_settings(trees: Sequence[str], vanilla: gr.Checkbox) -> SettingsPanel:
    """Put the settings into the gr.Blocks that is open; vanilla is one of them.

    They are remembered in the browser and said what they do as soon as one is touched.
    """
    made, reset = build_components(trees)
    panel = SettingsPanel({"vanilla": vanilla, **made}, trees)
    stored = script_block("kept")
    outputs = [made[name] for name in DEFAULTS]
    gr.on(
        [component.input for name, component in panel.components.items() if name != "system"],
        panel.remember,
        {vanilla, *outputs},
        [stored, *outputs],
        trigger_mode="always_last",
        **AT_ONCE,
    )
    reset.click(
        lambda is_plain: (to_line(DEFAULTS), *panel.restore(is_plain, "")),
        [vanilla],
        [stored, *outputs],
        **AT_ONCE,
    )
    page().load(
        panel.restore,
        [vanilla, stored],
        outputs,
        js=from_browser("medusa-chat-settings", 1),
        **AT_ONCE,
    )
    return panel


def restored(found: object, trees: Sequence[str]) -> dict[str, Any]:
    """What a browser remembered, each value checked; a default where one is missing or wrong."""
    values = dict(DEFAULTS)
    for name, value in found.items() if isinstance(found, dict) else ():
        if name in DEFAULTS and _is_good(name, value, trees):
            values[name] = value
    return values


def _is_good(name: str, value: object, trees: Sequence[str]) -> bool:
    try:
        checked({name: value}, trees)
    except MedusaChatError:
        return False
    return True


def _read(line: object) -> object:
    """What a browser kept, which may be anything."""
    try:
        return json.loads(line) if isinstance(line, str) else None
    except (ValueError, RecursionError):
        return None
