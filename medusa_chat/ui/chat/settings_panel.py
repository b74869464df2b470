"""SettingsPanel: the settings of the Chat tab: which do something, and what is remembered."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.settings import SAMPLING, sampling_words
from medusa_chat.messages import ModelInfo
from medusa_chat.runtime.presets import preset_names
from medusa_chat.ui.page.html_blocks import AT_ONCE, script_block
from medusa_chat.ui.page.inputs import (
    DRAFTERS,
    LABELS,
    PENALTIES,
    Posted,
    SettingsForm,
    follows,
    from_browser,
    refusal,
    touched,
)
from medusa_chat.ui.page.tree_view import to_line

ACCEPTANCES = [
    ("exact: every token is the model's own; the text is that of plain decoding", "exact"),
    ("typical: lossy; takes what is plausible, always the same text", "typical"),
    ("typical-sampled: lossy; samples from what is plausible", "typical-sampled"),
]
DEFAULTS: dict[str, Any] = {
    "drafter": "auto",
    "acceptance": "exact",
    "temperature": 0.7,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "posterior_threshold": 0.09,
    "locked": True,
    "posterior_alpha": 0.3,
    "tree": "auto",
    "nodes": None,
    "max_new_tokens": 512,
    "seed": "",
    "stop": "",
}
HINTS = {
    "drafter": "what proposes tokens; auto: the heads or draft model, if any, and the text itself",
    "acceptance": "which of the proposed tokens are accepted",
    "temperature": "0: always the most likely token",
    "top_p": "samples from the most likely tokens that make up this share; 1: all",
    "top_k": "samples from this many of the most likely tokens; 0: all",
    "min_p": "leaves out tokens below this share of the highest probability; 0: none",
    "repetition_penalty": "makes tokens of the whole text less likely; 1: off",
    "presence_penalty": "makes tokens of the answer less likely; 0: off",
    "frequency_penalty": "the same, the more often they are in it; 0: off",
    "posterior_threshold": "accepts a token if p > min(ε, δ·exp(−entropy))",
    "locked": "δ follows ε",
    "posterior_alpha": "accepts more where the model is unsure",
    "tree": "the shape of the draft",
    "nodes": "size of the tree with its root; empty: automatic",
    "max_new_tokens": "the answer ends after this many tokens",
    "seed": "empty: a new one for every answer",
    "stop": "one per line; the answer ends before it",
}
# Numbers have no range here: Gradio would raise before a handler can say what is wrong.
Words = Callable[[str], dict[str, Any]]  # of a setting's name: what Gradio shows
PRESET_EVENTS = ("give_preset", "take_preset", "drop_preset")
GREEDY = "no effect at temperature 0: always the most likely token"
Keep = Callable[[Any, dict[str, Any]], None]  # of a tab and the settings of its conversation
Model = Callable[[], ModelInfo | None]
OF_MODEL = (*SAMPLING, *PENALTIES[1:])  # a model's first chat begins with its own
NO_MODEL: Model = lambda: None  # noqa: E731


@dataclass(frozen=True)
class PresetParts:
    """The components of the presets. choice: its value is a name, empty for none. name: to save
    under. files: the block that saves, reads and deletes (presets.js)."""

    choice: gr.Dropdown
    name: gr.Textbox
    save: gr.Button
    files: gr.HTML


def build_components(
    trees: Sequence[str],
) -> tuple[dict[str, Any], gr.HTML, gr.Button, PresetParts]:
    """(the components by name, as the defaults make them; what the model's defaults are; the
    button that brings them back; the presets)."""
    now = idle({**DEFAULTS, "vanilla": False})

    def words(name: str) -> dict[str, Any]:
        info = now.get(name, HINTS[name])
        return {
            "value": DEFAULTS[name],
            "label": LABELS[name],
            "info": info,
            "interactive": name not in now,
        }

    with gr.Accordion("Settings", open=False, elem_id="settings"):
        presets = _presets()
        made = {**_sampling(words), **_drafting(words, trees), **_limits(words)}
        about = gr.HTML(elem_id="model-defaults", js_on_load=None)
        reset = gr.Button("Back to the model's defaults", size="sm", elem_id="reset")
        return made, about, reset, presets


def preset_choices(names: Sequence[str]) -> list[tuple[str, str]]:
    """What can be picked: none, or one of these."""
    return [("none", ""), *((name, name) for name in names)]


def _presets() -> PresetParts:
    with gr.Row(elem_id="presets-row"):
        choice = gr.Dropdown(
            preset_choices(()),
            value="",
            label="Preset",
            info="settings and a system prompt under a name",
            allow_custom_value=True,  # the list grows: what is picked is checked by its handler
            elem_id="preset",
        )
        name = gr.Textbox("", label="Save these settings as", max_lines=1, elem_id="preset-name")
        save = gr.Button("Save", size="sm", elem_id="preset-save", scale=0, min_width=80)
    return PresetParts(choice, name, save, script_block("presets", events=PRESET_EVENTS))


def _sampling(words: Words) -> dict[str, Any]:
    """The settings of acceptance and sampling."""
    made: dict[str, Any] = {
        "acceptance": gr.Radio(ACCEPTANCES, elem_id="acceptance", **words("acceptance"))
    }
    with gr.Row():
        made["temperature"] = gr.Slider(0, 2, step=0.05, **words("temperature"))
        made["top_p"] = gr.Slider(0, 1, step=0.01, **words("top_p"))
        made["top_k"] = gr.Number(step=1, **words("top_k"))
        made["min_p"] = gr.Slider(0, 1, step=0.01, **words("min_p"))
    with gr.Row():
        repetition = words("repetition_penalty")
        made["repetition_penalty"] = gr.Number(step=0.05, **repetition)
        for name in ("presence_penalty", "frequency_penalty"):
            made[name] = gr.Slider(-2, 2, step=0.05, **words(name))
    with gr.Row():
        epsilon = words("posterior_threshold")
        made["posterior_threshold"] = gr.Slider(0, 1, step=0.01, elem_id="epsilon", **epsilon)
        made["locked"] = gr.Checkbox(elem_id="lock", **words("locked"))
        delta = words("posterior_alpha")
        made["posterior_alpha"] = gr.Slider(0, 0.999, step=0.001, elem_id="delta", **delta)
    return made


def _drafting(words: Words, trees: Sequence[str]) -> dict[str, Any]:
    """The settings of drafting."""
    with gr.Row():
        return {
            "drafter": gr.Dropdown(list(DRAFTERS), **words("drafter")),
            "tree": gr.Dropdown(["auto", *trees], **words("tree")),
            "nodes": gr.Number(step=1, **words("nodes")),
        }


def _limits(words: Words) -> dict[str, Any]:
    with gr.Row():
        length = words("max_new_tokens")
        return {
            "max_new_tokens": gr.Number(step=1, **length),
            "seed": gr.Textbox(max_lines=1, **words("seed")),
            "stop": gr.Textbox(lines=1, max_lines=4, **words("stop")),
        }


def idle(values: Mapping[str, Any]) -> dict[str, str]:
    """The settings that do nothing now, and why. values: valid ones, by name."""
    is_plain, acceptance = values["vanilla"], values["acceptance"]
    is_lookup = values["drafter"] == "prompt-lookup"
    why: dict[str, str] = {}
    if is_plain:
        why |= dict.fromkeys(("drafter", "tree", "nodes"), "no effect: plain decoding has no draft")
    elif kinds.BY_NAME.get(values["drafter"], kinds.NONE).has_own_tree:
        why["tree"] = "no effect: this drafter makes its own tree; Nodes is its size"
    elif is_lookup:
        why["tree"] = "no effect: prompt lookup drafts a chain; Nodes is its length, at most 16"
    if values["temperature"] < 1e-3:
        names = ("acceptance", "top_p", "top_k", "min_p", "posterior_threshold", "locked")
        return why | dict.fromkeys((*names, "posterior_alpha", "seed"), GREEDY)
    if acceptance == "exact":
        names = ("posterior_threshold", "locked", "posterior_alpha")
        return why | dict.fromkeys(names, "no effect: ε and δ belong to typical acceptance")
    reason = f"no effect under {acceptance}: ε and δ decide"
    why |= dict.fromkeys(("top_p", "top_k", "min_p"), reason)
    if acceptance == "typical":
        why["seed"] = "no effect: typical acceptance is deterministic"
    if acceptance == "typical" and is_plain:
        names = ("temperature", "posterior_threshold", "locked", "posterior_alpha")
        why |= dict.fromkeys(names, "no effect: plain and typical is always the most likely token")
    elif values["locked"]:
        why["posterior_alpha"] = "locked: δ = √ε"
    return why


def updates(values: Mapping[str, Any]) -> list[Any]:
    """An update per setting: its value, whether it does something, else why not."""
    shown = dict(values)
    if shown["locked"]:
        shown["posterior_alpha"] = round(follows(shown["posterior_threshold"]), 3)
    now = idle(shown)
    return [
        gr.update(value=shown[name], interactive=name not in now, info=now.get(name, HINTS[name]))
        for name in DEFAULTS
    ]


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
