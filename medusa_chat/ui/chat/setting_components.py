"""The settings of an answer as Gradio's components, and which of them do something now."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from medusa_chat.decoding.drafters import kinds
from medusa_chat.ui.page.html_blocks import script_block
from medusa_chat.ui.page.inputs import DRAFTERS, LABELS, follows

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
