"""The Models tab: choose a checkpoint, see what it needs before any click, download and load it."""

from collections.abc import Sequence

import gradio as gr

from medusa_chat.hub import is_offline
from medusa_chat.hub.catalog import model_presets
from medusa_chat.ui.models.controller import ModelsController
from medusa_chat.ui.models.entries import grouped
from medusa_chat.ui.models.load_form import LoadChoices
from medusa_chat.ui.models.memory_fit import Machine
from medusa_chat.ui.models.rows import row_view
from medusa_chat.ui.models.view import ModelsTab
from medusa_chat.ui.page.html_blocks import AT_ONCE, script_block
from medusa_chat.ui.page.tree_view import to_line

QUANTISED = [("nf4 (4 bits)", "nf4"), ("int8 (8 bits)", "int8")]
PRECISIONS = ["auto", "fp32", "bf16", "fp16", *QUANTISED]
CONTEXTS = [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]


def build_models(controller: ModelsController) -> None:
    """Put the Models tab into the gr.Blocks that is open."""
    tab = gr.State(ModelsTab())
    with gr.Column(elem_id="models-column"):
        card = script_block("pick", events=["halt"])
        with gr.Row(elem_id="models-ask"):
            boxes = _boxes()
        rows = script_block("models", first_rows(), events=["drop_model", "load_model", "refresh"])
    inputs, outputs = [tab, *boxes], [card, rows]
    rows.refresh(controller.refresh, inputs, outputs, **AT_ONCE)
    rows.load_model(controller.load_model, inputs, outputs, **AT_ONCE)
    rows.drop_model(controller.drop_model, inputs, outputs, **AT_ONCE)
    card.halt(controller.halt, inputs, outputs, **AT_ONCE)


def first_rows() -> str:
    """What is shown before anything is looked up: the presets, at once and offline."""
    machine = Machine(is_offline=is_offline())
    groups, choices = grouped(LoadChoices(), model_presets(), (), ()), LoadChoices()
    rows = [row_view(group, entry, choices, machine) for group, entry in groups.all()]
    return to_line({"rows": rows, "memory": "", "search": "asking", "said": ""})


def _boxes() -> list[gr.components.Component]:
    """The boxes of the tab, in the order in which events post them."""
    asked = "vicuna, or owner/name, or ~/models/mine, or ~/models/mine.gguf"
    what = "Search, or a Hub id, or a folder, or a GGUF file"
    text = _textbox("text", what, asked, scale=4, min_width=240)
    usual = "the one they were trained for"
    backbone = _textbox("backbone", "Another backbone for the heads", usual, scale=3, min_width=200)
    contexts = [("auto", "auto"), *((f"{count:,}", str(count)) for count in CONTEXTS)]
    return [
        *(text, backbone, _dropdown("precision", "Precision", PRECISIONS)),
        _dropdown("context", "Context, at most", contexts),
    ]


def _textbox(name: str, label: str, placeholder: str, **size: int) -> gr.Textbox:
    return gr.Textbox(
        value="",  # else it posts null until the browser has drawn it
        elem_id=f"models-{name}",
        label=label,
        placeholder=placeholder,
        max_lines=1,
        **size,
    )


def _dropdown(name: str, label: str, choices: Sequence[str | tuple[str, str]]) -> gr.Dropdown:
    """A choice whose first value is auto."""
    return gr.Dropdown(choices, value="auto", elem_id=f"models-{name}", label=label, min_width=120)
