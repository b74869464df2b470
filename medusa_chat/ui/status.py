"""The line at the top of the page: which model, where, and what it does or cannot do."""

from typing import Any

import gradio as gr

from medusa_chat.messages import ModelInfo
from medusa_chat.session import ModelState, Session
from medusa_chat.ui.drawn import AT_ONCE, drawn
from medusa_chat.ui.tree_view import to_line

PHASES = {
    "start": "starting the model's process",
    "restart": "restarting the model's process",
    "resolve": "looking for the files",
    "read": "reading weights",
    "check": "checking weights",
    "warm up": "warming up",
}


def build_status(session: Session) -> None:
    """Put the line at the top of the gr.Blocks that is open; it looks again every second."""
    line = drawn("status", status_line(session.state))
    gr.Timer(1.0).tick(lambda: status_line(session.state), None, [line], **AT_ONCE)


def status_line(state: ModelState) -> str:
    """JSON: facts of the loaded model with the reasons behind them, else one sentence."""
    line: dict[str, Any] = {"status": state.status, "text": "", "facts": [], "notes": []}
    if state.model is not None:
        line |= _facts(state.model)
    elif state.status == "loading":
        line["text"] = f"Loading: {phase_text(state)} …"
    else:
        line["text"] = state.message or "No model is loaded."
    return to_line(line)


def phase_text(state: ModelState) -> str:
    """What loading does now, in words."""
    return PHASES.get(state.phase, state.phase)


def _facts(model: ModelInfo) -> dict[str, Any]:
    heads = f"{model.heads} heads" if model.heads else "no Medusa heads"
    return {
        "facts": [
            ["model", model.name, f"{model.family}, {model.parameters:,} parameters"],
            ["precision", model.precision, ""],
            ["device", model.device, f"{model.memory_bytes / 2**20:,.0f} MiB"],
            ["context", f"{model.context:,} tokens", ""],
            ["heads", heads, ""],
            ["tree", f"{model.tree}, {model.nodes} nodes", model.tree_reason],
        ],
        "notes": [f"tree: {model.tree_reason}", *model.notes],
    }
