"""A training as data for the Tune tab: how far it is, its curves, how it ended. No gradio."""

from collections.abc import Sequence
from typing import Any

from medusa_chat.training.events import Run
from medusa_chat.ui.page.status import without_folders
from medusa_chat.ui.page.tree_view import short

MOST_POINTS = 120
STAGES = {
    "answered": "asking the backbone",
    "hidden": "running the backbone over the examples",
}


def train_view(run: Run | None, is_guest: bool = False) -> dict[str, Any] | None:
    """The latest training; None where there is none. A guest sees no folder but its name."""
    if run is None:
        return None
    steps = [event for event in run.events if event["event"] == "step" and _is_step(event)]
    held = [event for event in run.events if event["event"] == "evaluated" and _is_held(event)]
    output = without_folders(run.output) if is_guest else run.output
    is_running = run.is_running
    return {
        "output": output,
        "started": run.started[:16].replace("T", " ") + " UTC",
        "running": is_running,
        "stoppable": is_running and run.can_stop and not is_guest,
        "text": state_text(run, is_running, steps, is_guest),
        "part": steps[-1]["step"] / max(steps[-1]["steps"], 1) if steps else None,
        "loss": _curve(steps, lambda step: step["loss"]),
        "lm_loss": _curve(
            [s for s in steps if _is_number(s.get("lm_loss"))], lambda s: s["lm_loss"]
        ),
        "top1": [_curve(steps, lambda s, h=head: s["top"][h][0]) for head in range(_heads(steps))],
        "held": [
            [[event["step"], short(event["top"][head][0])] for event in held]
            for head in range(_heads(held))
        ],
    }


def state_text(run: Run, is_running: bool, steps: Sequence[Any], is_guest: bool = False) -> str:
    """Where it is, or how it ended, in a sentence."""
    ended = run.ended
    if ended is not None:
        reason = ended.get("reason")
        if reason == "done":
            return "Finished: the checkpoint is written."
        if reason == "stopped":
            return "Stopped. The same command with --resume continues it."
        said = "" if is_guest else str(ended.get("message", ""))
        return f"Failed{f': {said}' if said else ''}."
    if not is_running:
        return "Its process ended unexpectedly. The same command with --resume continues it."
    if steps:
        last = steps[-1]
        return f"Step {last['step']:,} of {last['steps']:,}, loss {last['loss']:.3f}."
    event = run.events[-1] if run.events else {"event": "began"}
    if event["event"] == "stage":
        return f"{str(event.get('name', ''))[:200]} …"
    return f"{STAGES.get(event['event'], 'beginning')} …"


def _curve(steps: Sequence[Any], value: Any) -> list[list[float]]:
    """[step, mean value] of neighbours, so that at most MOST_POINTS are left."""
    width = max(1, -(-len(steps) // MOST_POINTS))
    groups = [steps[at : at + width] for at in range(0, len(steps), width)]
    return [[g[-1]["step"], short(sum(map(value, g)) / len(g))] for g in groups]


def _heads(events: Sequence[Any]) -> int:
    return min((len(event["top"]) for event in events), default=0)


def _is_step(event: dict[str, Any]) -> bool:
    """Whether the line has what is drawn: it comes from a file."""
    numbers = [event.get("step"), event.get("steps"), event.get("loss")]
    return all(map(_is_number, numbers)) and _is_top(event.get("top"))


def _is_held(event: dict[str, Any]) -> bool:
    return _is_number(event.get("step")) and _is_top(event.get("top"))


def _is_top(top: Any) -> bool:
    rows = isinstance(top, list) and all(isinstance(row, list) and row for row in top)
    return rows and all(_is_number(value) for row in top for value in row)


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and abs(value) < 1e12
