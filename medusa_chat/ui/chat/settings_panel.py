"""SettingsPanel: the settings of the Chat tab, and what a browser remembers of them."""

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from medusa_chat.ui.chat.setting_components import DEFAULTS, build_components, updates
from medusa_chat.ui.page.html_blocks import AT_ONCE, script_block
from medusa_chat.ui.page.settings_form import Posted, SettingsForm, refusal, touched
from medusa_chat.ui.page.tree_view import to_line

Keep = Callable[[Any, dict[str, Any]], None]  # of a tab and the settings of its conversation


class SettingsPanel(SettingsForm):
    """The chat's settings: all there are, remembered by the browser for its next conversation."""

    def remember(self, posted: Posted) -> list[Any]:
        """(what the browser shall keep, an update per setting): vanilla is for now, never for the
        next visit. Values stay as they are but for a delta that follows epsilon; under a field
        whose value is refused stands why."""
        values, valid = self.named(posted), self.valid(posted)
        shown = {**valid, "vanilla": values["vanilla"] is True}
        changes = updates(shown)
        for change, name in zip(changes, DEFAULTS, strict=True):
            if name != "posterior_alpha" or not shown["locked"]:
                change.pop("value")
            if wrong := refusal(name, values.get(name), self.trees):
                change["info"] = f"⚠ {wrong}"
        return [to_line(valid), *changes]

    def shown(self, is_plain: object, restored: object) -> list[Any]:
        """An update per setting: those of a conversation, or what a browser kept as JSON."""
        values = self.restored(restored)
        return updates({**values, "vanilla": is_plain is True})

    @property
    def outputs(self) -> list[gr.components.Component]:
        """The components that `shown` has updates for."""
        return [self.components[name] for name in DEFAULTS]


def build_settings(
    trees: Sequence[str],
    vanilla: gr.Checkbox,
    system: gr.Textbox,
    tab: gr.State,
    keep: Keep = lambda tab, settings: None,
) -> SettingsPanel:
    """Put the settings into the gr.Blocks that is open; vanilla and the system prompt, which
    belongs to the conversation, are posted with them.

    As soon as one is touched the browser remembers all, and so does the conversation: `keep`.
    """
    made, reset = build_components(trees)
    panel = SettingsPanel({"vanilla": vanilla, "system": system, **made}, trees, DEFAULTS)
    stored = script_block("kept", KEY="medusa-chat-settings", PANEL="settings")

    def remember(posted: Posted) -> list[Any]:
        keep(posted[tab], panel.valid(posted))
        return panel.remember(posted)

    def defaults(tab: Any, is_plain: object) -> list[Any]:
        keep(tab, dict(DEFAULTS))
        return [to_line(DEFAULTS), *panel.shown(is_plain, DEFAULTS)]

    gr.on(
        [event for name in ("vanilla", *made) for event in touched(panel.components[name])],
        remember,
        {tab, vanilla, *panel.outputs},
        [stored, *panel.outputs],
        trigger_mode="always_last",
        **AT_ONCE,
    )
    reset.click(defaults, [tab, vanilla], [stored, *panel.outputs], **AT_ONCE)
    return panel
