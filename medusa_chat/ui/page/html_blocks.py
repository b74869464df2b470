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
# What stands between elements.js and <name>.js, in one scope with both.
PARTS = {
    "tree": (
        *("draw", "words", "numbers", "chart", "mask", "card", "timeline", "frame", "layout"),
        *("walk", "steps", "whatif", "stored", "pane", "gpu", "pace"),
    ),
    "tune": ("draw", "words", "mask", "layout", "plot", "heat", "shape"),
    **dict.fromkeys(("roof", "train"), ("draw", "plot")),
    "next": ("stored", "inert", "show", "follow"),
    "tint": ("stored", "drawn", "typed", "align", "hover", "selected"),
    "live": ("emptied", "drawn", "scroll", "code"),
    "compare": ("stored", "gpu", "race", "figures", "lanes", "replay"),
    "versions": ("drawn", "byline"),
    **dict.fromkeys(("models", "pick", "offer"), ("try",)),
    "conversations": ("stored", "drawer", "system", "address", "row", "backup"),
    **dict.fromkeys(("look", "kept"), ("stored",)),
}


def script_block(name: str, value: str = "", elem_id: str = "", **constants: object) -> gr.HTML:
    """A block drawn by assets/js/<name>.js from JSON; its template never mentions the value.
    elem_id: where the name is another block's. constants: what its script knows from the start,
    by name."""
    known = [f"const {constant} = {to_line(made)};" for constant, made in constants.items()]
    return gr.HTML(
        value,
        elem_id=elem_id or name,
        html_template=f'<div class="{name}-block"></div>',
        js_on_load="\n".join(
            [*known, *(_script(part) for part in ("elements", *PARTS.get(name, ()), name))],
        ),
        apply_default_css=False,
    )


def _script(name: str) -> str:
    return asset("js", f"{name}.js").read_text(encoding="utf-8")


def event_field(event: gr.EventData, name: str) -> object:
    """A field of what an event brought; None when it brought none."""
    data = getattr(event, "_data", None)
    return data.get(name) if isinstance(data, dict) else None


def changes(shown: list[str], *now: str) -> tuple[Any, ...]:
    """What blocks say now, each only where it is another than a tab shows. shown: what that is,
    kept by the tab."""
    news = tuple(gr.skip() if old == new else new for old, new in zip(shown, now, strict=True))
    shown[:] = now
    return news


def page() -> gr.Blocks:
    """The gr.Blocks that is open, for what happens when a browser loads it."""
    assert isinstance(Context.root_block, gr.Blocks), "build inside a gr.Blocks"
    return Context.root_block
