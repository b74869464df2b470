"""Blocks that our own scripts draw, and how the page's private events run."""

from collections.abc import Sequence
from typing import Any

import gradio as gr
from gradio.context import Context

from medusa_chat.ui.page.tree_view import to_line

# An event of the page's own: nobody else's business, and no spinner over the answer. It shows its
# progress on nothing: else every update of any event has Gradio read all properties of all outputs.
QUIET: dict[str, Any] = {
    "api_visibility": "private",
    "show_progress": "hidden",
    "show_progress_on": [],
}
AT_ONCE: dict[str, Any] = {**QUIET, "queue": False}  # never behind an answer
# Gradio's part in it: once the place of a block is there, its script gets it (assets/js/block.js).
# Where a module is lost on the way, all is loaded again (link.js).
BEGINS = """import("medusa/block.js")
  .then(({ begin }) => begin(NAME, ID, { element, props, watch, trigger }, GIVEN, EVENTS))
  .catch((error) => {
    const isLost = /module script|imported module/i.test(error.message);
    if (isLost) dispatchEvent(new Event("medusa-part-lost"));
    else throw error;
  });"""


def script_block(
    name: str, value: str = "", *, events: Sequence[str] = (), elem_id: str = "", **given: object
) -> gr.HTML:
    """A block drawn by assets/js/<name>.js from JSON; its template never mentions the value.
    events: that its script sends; Gradio looks for their names in what it runs. elem_id: where the
    name is another block's. given: what its script knows from the start, by name."""
    known = {"NAME": name, "ID": elem_id or name, "GIVEN": given, "EVENTS": list(events)}
    constants = "".join(f"const {key} = {to_line(made)};\n" for key, made in known.items())
    return gr.HTML(
        value,
        elem_id=elem_id or name,
        html_template="<div></div>",
        js_on_load=constants + BEGINS,
        apply_default_css=False,
    )


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
