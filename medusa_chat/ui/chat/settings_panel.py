"""SettingsPanel: the settings of the Chat tab, and what a browser remembers of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from medusa_chat.decoding.settings import SAMPLING, sampling_words
from medusa_chat.messages import ModelInfo
from medusa_chat.runtime.presets import preset_names
from medusa_chat.ui.chat.setting_components import (
    DEFAULTS,
    PresetParts,
    build_components,
    preset_choices,
    updates,
)
from medusa_chat.ui.page.html_blocks import AT_ONCE, script_block
from medusa_chat.ui.page.inputs import PENALTIES, from_browser
from medusa_chat.ui.page.settings_form import Posted, SettingsForm, refusal, touched
from medusa_chat.ui.page.tree_view import to_line

Keep = Callable[[Any, dict[str, Any]], None]  # of a tab and the settings of its conversation
Model = Callable[[], ModelInfo | None]
OF_MODEL = (*SAMPLING, *PENALTIES[1:])  # a model's first chat begins with its own
NO_MODEL: Model = lambda: None  # noqa: E731


@dataclass(frozen=True)
class SettingsPanel(SettingsForm):
    """The chat's settings: all there are, remembered by the browser for its next conversation.

    Kept settings have "model" too: the name of the model whose defaults they began with. origin:
    that name, of those that are shown; about: what the defaults are; model: the loaded one. They
    have "preset", too: the name of the one that was picked, empty for none.
    """

    origin: gr.State = field(kw_only=True)
    about: gr.HTML = field(kw_only=True)
    model: Model = field(kw_only=True)
    presets: PresetParts = field(kw_only=True)

    @property
    def base(self) -> dict[str, Any]:
        """The defaults: the model's own, and the page's where it names none."""
        model = self.model()
        return {**self.defaults, **(model.sampling if model else {})}

    def first(self, stored: object) -> dict[str, Any]:
        """Settings to keep of a new conversation, from those kept before or a browser's JSON: if
        they are of another model, those of sampling are this model's defaults, without a preset."""
        kept = stored if isinstance(stored, dict) else from_browser(stored)
        values, name, model = self.restored(kept), str(kept.get("model", "")), self.model()
        preset = str(kept.get("preset", ""))
        if model and name != model.name and (name or model.sampling) and not preset:
            values |= {one: self.base[one] for one in OF_MODEL}
        return {**values, "model": model.name if model else name, "preset": preset}

    def anew(self, stored: object) -> dict[str, Any]:
        """As `first`, of settings of another conversation: its stop strings would end answers here
        and nobody would see why, but for those of a preset, which is named."""
        first = self.first(stored)
        return first if first["preset"] else {**first, "stop": DEFAULTS["stop"]}

    def kept(self, posted: Posted) -> dict[str, Any]:
        """Settings to keep of what was posted."""
        names = {"model": self.origin, "preset": self.presets.choice}
        told = {name: str(posted.get(component) or "") for name, component in names.items()}
        if told["preset"] not in preset_names():  # the box takes any text
            told["preset"] = ""
        return {**self.valid(posted), **told}

    def remember(self, posted: Posted) -> list[Any]:
        """(what the browser shall keep, an update per output): vanilla is for now, never for the
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
        return [to_line(self.kept(posted)), *changes, gr.skip(), gr.skip(), gr.skip()]

    def shown(
        self, is_plain: object, kept: Mapping[str, Any], names: Sequence[str] | None = None
    ) -> list[Any]:
        """An update per output: the settings of a conversation. names: of the presets that can be
        picked, where they may be others than before."""
        values = {**self.restored(kept), "vanilla": is_plain is True}
        preset = gr.update(value=kept.get("preset", ""))
        if names is not None:
            preset["choices"] = preset_choices(names)
        return [*updates(values), kept.get("model", ""), preset, self.words]

    @property
    def words(self) -> str:
        """What the model's defaults are."""
        model = self.model()
        if model is None:
            return ""
        own = sampling_words(model.sampling)
        return f"Model's defaults: {own or 'none named'}"

    @property
    def outputs(self) -> list[gr.components.Component]:
        """The components that `shown` has updates for."""
        made = (self.components[name] for name in DEFAULTS)
        return [*made, self.origin, self.presets.choice, self.about]


def build_settings(
    trees: Sequence[str],
    vanilla: gr.Checkbox,
    system: gr.Textbox,
    tab: gr.State,
    keep: Keep = lambda tab, settings: None,
    model: Model = NO_MODEL,
) -> SettingsPanel:
    """Put the settings into the gr.Blocks that is open; vanilla and the system prompt, which
    belongs to the conversation, are posted with them.

    As soon as one is touched the browser remembers all, and so does the conversation: `keep`.
    """
    made, about, reset, presets = build_components(trees)
    components = {"vanilla": vanilla, "system": system, **made}
    origin = gr.State("")
    own: dict[str, Any] = {"origin": origin, "about": about, "model": model, "presets": presets}
    panel = SettingsPanel(components, trees, DEFAULTS, **own)
    stored = script_block("kept", KEY="medusa-chat-settings", PANEL="settings")

    def remember(posted: Posted) -> list[Any]:
        keep(posted[tab], panel.kept(posted))
        return panel.remember(posted)

    def defaults(tab: Any, is_plain: object) -> list[Any]:
        loaded = model()
        values = {**panel.base, "model": loaded.name if loaded else ""}
        keep(tab, values)
        tab.list_version = -1  # its line names the preset
        return [to_line(values), *panel.shown(is_plain, values)]

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
