"""SettingsPanel: the settings of the Chat tab, and what a browser remembers of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from medusa_chat.decoding.settings import SAMPLING, sampling_words
from medusa_chat.messages import ModelInfo
from medusa_chat.ui.chat.setting_components import DEFAULTS, build_components, updates
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
    that name, of those that are shown; about: what the defaults are; model: the loaded one.
    """

    origin: gr.State = field(kw_only=True)
    about: gr.HTML = field(kw_only=True)
    model: Model = field(kw_only=True)

    @property
    def base(self) -> dict[str, Any]:
        """The defaults: the model's own, and the page's where it names none."""
        model = self.model()
        return {**self.defaults, **(model.sampling if model else {})}

    def first(self, stored: object) -> dict[str, Any]:
        """Settings to keep of a new conversation, from those kept before or a browser's JSON: if
        they are of another model, those of sampling are this model's defaults."""
        kept = stored if isinstance(stored, dict) else from_browser(stored)
        values, name, model = self.restored(kept), str(kept.get("model", "")), self.model()
        if model is not None and name != model.name and (name or model.sampling):
            values |= {one: self.base[one] for one in OF_MODEL}
        return {**values, "model": model.name if model else name}

    def anew(self, stored: object) -> dict[str, Any]:
        """As `first`, of settings of another conversation: its stop strings would end answers here
        and nobody would see why."""
        return {**self.first(stored), "stop": DEFAULTS["stop"]}

    def kept(self, posted: Posted) -> dict[str, Any]:
        """Settings to keep of what was posted."""
        return {**self.valid(posted), "model": str(posted.get(self.origin) or "")}

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
        return [to_line(self.kept(posted)), *changes, gr.skip(), gr.skip()]

    def shown(self, is_plain: object, kept: Mapping[str, Any]) -> list[Any]:
        """An update per output: the settings of a conversation."""
        values = {**self.restored(kept), "vanilla": is_plain is True}
        return [*updates(values), kept.get("model", ""), self.words]

    @property
    def words(self) -> str:
        """What the model's defaults are."""
        model = self.model()
        if model is None:
            return ""
        own = sampling_words(model.sampling)
        return f"Model's defaults: {own or 'it names none'}"

    @property
    def outputs(self) -> list[gr.components.Component]:
        """The components that `shown` has updates for."""
        return [*(self.components[name] for name in DEFAULTS), self.origin, self.about]


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
    made, about, reset = build_components(trees)
    components = {"vanilla": vanilla, "system": system, **made}
    origin = gr.State("")
    panel = SettingsPanel(components, trees, DEFAULTS, origin=origin, about=about, model=model)
    stored = script_block("kept", KEY="medusa-chat-settings", PANEL="settings")

    def remember(posted: Posted) -> list[Any]:
        keep(posted[tab], panel.kept(posted))
        return panel.remember(posted)

    def defaults(tab: Any, is_plain: object) -> list[Any]:
        loaded = model()
        values = {**panel.base, "model": loaded.name if loaded else ""}
        keep(tab, values)
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
