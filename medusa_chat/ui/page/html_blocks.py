"""Blocks that our own scripts draw, and how the page's private events run."""

from typing import Any

import gradio as gr
from gradio.context import Context

from medusa_chat.paths import asset
from medusa_chat.ui.page.tree_view import to_line

# An event of the page's own: nobody else's business, and no spinner over the answer. It shows its
# progress on nothing: else every update of any event has Gradio read all properties of all outputs.
QUIET: dict[str, Any] = {
    "api_visibility": "private",
    "show_progress": "hidden",
    "show_progress_on": [],
}
AT_ONCE: dict[str, Any] = {**QUIET, "queue": False}  # never behind an answer
# Blocks whose script is in more than one file: what stands before <name>.js, in one scope with it.
PARTS = {
    "tree": (
        *("elements", "draw", "words", "numbers", "chart", "mask", "card", "timeline"),
        *("frame", "layout", "walk", "steps", "whatif", "stored", "gpu", "pace"),
    ),
    "tune": ("elements", "draw", "words", "mask", "layout", "plot", "heat", "shape"),
    "roof": ("elements", "draw", "plot"),
    "train": ("elements", "draw", "plot"),
    "next": ("elements", "stored", "reasoning", "show", "follow"),
    "tint": ("elements", "stored", "typed", "align", "hover"),
    "live": ("elements", "emptied", "scroll", "reasoning"),
    "compare": ("elements", "stored", "gpu", "race", "figures", "lanes", "replay"),
    **dict.fromkeys(("status", "share", "versions", "keys"), ("elements",)),
    **dict.fromkeys(("models", "pick", "offer"), ("elements", "try")),
    "conversations": ("elements", "stored", "drawer", "system", "row"),
    "look": ("elements", "stored"),
    "kept": ("stored",),
}


def script_block(name: str, value: str = "", **constants: object) -> gr.HTML:
    """A block drawn by assets/js/<name>.js from JSON; its template never mentions the value.
    constants: what its script knows from the start, by name."""
    known = [f"const {constant} = {to_line(made)};" for constant, made in constants.items()]
    return gr.HTML(
        value,
        elem_id=name,
        html_template=f'<div class="{name}-block"></div>',
        js_on_load="\n".join(
            [*known, *(_script(part) for part in (*PARTS.get(name, ()), name))],
        ),
        apply_default_css=False,
    )


def _script(name: str) -> str:
    return asset("js", f"{name}.js").read_text(encoding="utf-8")


def event_field(event: gr.EventData, name: str) -> object:
    """A field of what an event brought; None when it brought none."""
    data = getattr(event, "_data", None)
    return data.get(name) if isinstance(data, dict) else None


def page() -> gr.Blocks:
    """The gr.Blocks that is open, for what happens when a browser loads it."""
    assert isinstance(Context.root_block, gr.Blocks), "build inside a gr.Blocks"
    return Context.root_block
