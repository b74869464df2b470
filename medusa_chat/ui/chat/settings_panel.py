"""Controls: the settings of an answer, which of them do something now, and what is remembered."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.errors import MedusaChatError
from medusa_chat.ui.page.html_blocks import AT_ONCE, drawn, kept, page
from medusa_chat.ui.page.inputs import DRAFTERS, checked, follows
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
    "drafter": "who proposes candidates; auto: the heads, if any",
    "acceptance": "which candidates are kept",
    "temperature": "0: always the likeliest token",
    "top_p": "samples from this share of the probability; 1: all",
    "top_k": "samples from so many tokens; 0: all",
    "posterior_threshold": "accept above min(ε, δ·exp(−entropy))",
    "locked": "δ follows ε",
    "posterior_alpha": "lets more through where the model is unsure",
    "tree": "the shape of the candidates",
    "nodes": "empty: the tree's own; the root counts",
    "max_new_tokens": "the answer ends there",
    "seed": "empty: a fresh one",
    "stop": "one a line; the answer ends before it",
}
GREEDY = "no effect at temperature 0: always the likeliest token"


def build_controls(trees: Sequence[str], vanilla: gr.Checkbox) -> dict[str, Any]:
    """Put the settings into the gr.Blocks that is open; the components by name, vanilla included.

    They are remembered in the browser and said what they do as soon as one is touched.
    """
    made = _made(trees)
    stored = drawn("kept")
    names = list(DEFAULTS)
    inputs, outputs = [vanilla, *(made[name] for name in names)], [made[name] for name in names]
    gr.on(
        [made[name].input for name in names] + [vanilla.input],
        lambda *values: (_remembered(values, trees), *_explained(values, trees)),
        inputs,
        [stored, *outputs],
        trigger_mode="always_last",
        **AT_ONCE,
    )
    made["reset"].click(
        lambda is_plain: (to_line(DEFAULTS), *_drawn({**DEFAULTS, "vanilla": is_plain is True})),
        [vanilla],
        [stored, *outputs],
        **AT_ONCE,
    )
    page().load(
        lambda is_plain, line: _drawn(
            {**restored(_read(line), trees), "vanilla": is_plain is True}
        ),
        [vanilla, stored],
        outputs,
        js=kept("medusa-chat-settings", 1),
        **AT_ONCE,
    )
    return {"vanilla": vanilla, **made}


def _made(trees: Sequence[str]) -> dict[str, Any]:
    """The components, as the defaults make them."""
    now = idle({**DEFAULTS, "vanilla": False})

    def words(name: str, label: str) -> dict[str, Any]:
        is_used = name not in now
        text = HINTS[name] if is_used else now[name]
        value = DEFAULTS[name]
        return {"value": value, "label": label, "info": text, "interactive": is_used}

    made: dict[str, Any] = {}
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        made["acceptance"] = gr.Radio(
            ACCEPTANCES, elem_id="acceptance", **words("acceptance", "Acceptance")
        )
        with gr.Row():
            made["temperature"] = gr.Slider(0, 2, step=0.05, **words("temperature", "Temperature"))
            made["top_p"] = gr.Slider(0, 1, step=0.01, **words("top_p", "Top-p"))
            made["top_k"] = gr.Number(minimum=0, step=1, **words("top_k", "Top-k"))
        with gr.Row():
            made["posterior_threshold"] = gr.Slider(
                0, 1, step=0.01, **words("posterior_threshold", "ε (threshold)")
            )
            made["locked"] = gr.Checkbox(elem_id="lock", **words("locked", "lock δ = √ε"))
            made["posterior_alpha"] = gr.Slider(
                0, 0.999, step=0.001, **words("posterior_alpha", "δ (alpha)")
            )
        with gr.Row():
            made["drafter"] = gr.Dropdown(list(DRAFTERS), **words("drafter", "Drafter"))
            made["tree"] = gr.Dropdown(["auto", *trees], **words("tree", "Tree"))
            made["nodes"] = gr.Number(
                minimum=1, maximum=MAX_NODES, step=1, **words("nodes", "Nodes")
            )
        with gr.Row():
            made["max_new_tokens"] = gr.Number(
                minimum=1, step=1, **words("max_new_tokens", "Max new tokens")
            )
            made["seed"] = gr.Textbox(max_lines=1, **words("seed", "Seed"))
            made["stop"] = gr.Textbox(lines=1, max_lines=4, **words("stop", "Stop strings"))
        made["system"] = gr.Textbox(
            "",
            label="System prompt (optional)",
            info="goes before every message of this conversation",
            lines=1,
            max_lines=6,
            elem_id="system",
        )
        made["reset"] = gr.Button("Reset settings", size="sm", elem_id="reset")
    return made


def idle(values: Mapping[str, Any]) -> dict[str, str]:
    """The settings that do nothing now, and why. values: valid ones, by name."""
    is_plain, acceptance = values["vanilla"], values["acceptance"]
    is_lookup = values["drafter"] == "prompt-lookup"
    why: dict[str, str] = {}
    if is_plain:
        why |= dict.fromkeys(("drafter", "tree", "nodes"), "no effect: Vanilla drafts nothing")
    elif is_lookup:
        why["tree"] = "no effect: prompt lookup grows its own tree; Nodes is its size"
    if values["temperature"] < 1e-3:
        names = ("acceptance", "top_p", "top_k", "posterior_threshold", "locked")
        return why | dict.fromkeys((*names, "posterior_alpha", "seed"), GREEDY)
    if acceptance == "exact":
        names = ("posterior_threshold", "locked", "posterior_alpha")
        return why | dict.fromkeys(names, "no effect: ε and δ belong to typical acceptance")
    reason = f"no effect under {acceptance}: ε and δ decide"
    why |= dict.fromkeys(("top_p", "top_k"), reason)
    if acceptance == "typical":
        why["seed"] = "no effect: typical acceptance throws no dice"
    if acceptance == "typical" and is_plain:
        names = ("temperature", "posterior_threshold", "locked", "posterior_alpha")
        why |= dict.fromkeys(names, "no effect: plain and typical is always the likeliest token")
    elif values["locked"]:
        why["posterior_alpha"] = "locked: δ = √ε"
    return why


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


def _remembered(values: Sequence[Any], trees: Sequence[str]) -> str:
    """What the browser shall keep: vanilla is for now, never for the next visit."""
    return to_line(restored(dict(zip(DEFAULTS, values[1:], strict=True)), trees))


def _explained(values: Sequence[Any], trees: Sequence[str]) -> list[Any]:
    """Which settings do something now; values stay as they are but for a delta that follows."""
    posted = dict(zip(("vanilla", *DEFAULTS), values, strict=True))
    valid = {**restored(posted, trees), "vanilla": posted["vanilla"] is True}
    updates = _drawn(valid)
    for update, name in zip(updates, DEFAULTS, strict=True):
        if name != "posterior_alpha" or not valid["locked"]:
            update.pop("value")
    return updates


def _drawn(values: Mapping[str, Any]) -> list[Any]:
    """An update per setting: its value, whether it does something, else why not."""
    shown = dict(values)
    if shown["locked"]:
        shown["posterior_alpha"] = round(follows(shown["posterior_threshold"]), 3)
    now = idle(shown)
    return [
        gr.update(value=shown[name], interactive=name not in now, info=now.get(name, HINTS[name]))
        for name in DEFAULTS
    ]
