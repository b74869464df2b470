"""The Tune tab: what the heads are worth here, the tree in use, and what its steps cost."""

from typing import Any

import gradio as gr

from medusa_chat.errors import MedusaChatError
from medusa_chat.runtime.session import Session
from medusa_chat.training.events import Run, latest
from medusa_chat.training.hardware import GPUS, SHAPES
from medusa_chat.trees.expected_length import expected_lengths, likeliest
from medusa_chat.ui.access.guard import is_guest
from medusa_chat.ui.access.notices import inform, warn
from medusa_chat.ui.page.html_blocks import AT_ONCE, changes, script_block
from medusa_chat.ui.page.tree_view import to_line
from medusa_chat.ui.tune.roofline import (
    BATCHES,
    CONTEXTS,
    NODES,
    PAPER_NODES,
    roof_view,
    setting_of,
)
from medusa_chat.ui.tune.training_view import train_view
from medusa_chat.ui.tune.view import tune_view

FIRST = ("A100-80GB-PCIe", "7B", "1024", "1", "64", "paper")
NOT_YOURS = "Only the person who shared this page may stop a training."
WHOSE = [("the paper's 7B", "paper"), ("this model's", "loaded")]


class TuneController:
    """The tab's event handlers, shared by all browser tabs. Guests can only look."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._run: Run | None = None

    # ---- events ----

    def refresh(self, shown: list[str], request: gr.Request) -> tuple[Any, ...]:
        """(picture, training) where they have changed; asked for about once a second by a tab in
        sight."""
        guest = is_guest(request)
        run = train_view(self.latest(), guest)
        return changes(shown, to_line(self.view(guest)), to_line(run) if run else "")

    def halt(self, shown: list[str], request: gr.Request) -> tuple[Any, ...]:
        """Ask the training that runs to stop at its next step."""
        run = self.latest()
        if is_guest(request):
            inform(NOT_YOURS)
        elif run is not None and run.can_stop and run.is_running:
            try:
                run.ask_to_stop()
            except OSError as error:
                warn(f"The training cannot be stopped from here: {error.strerror}")
        return self.refresh(shown, request)

    def model(self, *posted: object) -> Any:
        """The hardware model for what was chosen: GPU, size, context, batch, nodes, whose heads."""
        try:
            chosen = setting_of(*posted[:-1])
        except (MedusaChatError, TypeError) as error:
            warn(str(error))
            return gr.skip()
        return to_line(roof_view(chosen, self.tokens() if posted[-1] == "loaded" else None))

    # ---- what they need ----

    def view(self, guest: bool = False) -> dict[str, Any]:
        """What the tab shows now."""
        return tune_view(self.session.state, guest)

    def latest(self) -> Run | None:
        """The training of this user that was begun last."""
        self._run = latest(last_seen=self._run)
        return self._run

    def tokens(self) -> float | None:
        """Tokens a step that the loaded model's heads promise at 64 nodes; None without heads."""
        model = self.session.state.model
        if model is None or model.tree_facts is None:
            return None
        table = model.tree_facts.accuracies
        return expected_lengths(likeliest(table, PAPER_NODES), table)[-1]


def build_tune(session: Session) -> TuneController:
    """Put the Tune tab into the gr.Blocks that is open."""
    controller = TuneController(session)
    shown = gr.State(["", ""])  # the picture and the training of a browser tab
    with gr.Column(elem_id="tune-column"):
        picture = script_block("tune", events=["refresh"])
        training = script_block("train", events=["halt"])
        with gr.Column(elem_id="roof-card"):
            gr.HTML(ROOF_TITLE, elem_id="roof-title", js_on_load=None)
            with gr.Row(elem_id="roof-ask"):
                boxes = _boxes()
            roof = script_block("roof", to_line(roof_view(setting_of(*FIRST[:-1]))))
    picture.refresh(controller.refresh, [shown], [picture, training], **AT_ONCE)
    training.halt(controller.halt, [shown], [picture, training], **AT_ONCE)
    for box in boxes:
        box.input(controller.model, boxes, [roof], **AT_ONCE)
    return controller


ROOF_TITLE = (
    "<h3>On another GPU</h3><p>The paper's hardware model (appendix G): what a tree of some size "
    "costs and brings on a named GPU, by arithmetic. Nothing here was measured.</p>"
)


def _boxes() -> list[Any]:
    """The roofline's components, in the order of `FIRST`."""
    gpu, shape, context, batch, nodes, whose = FIRST
    return [
        gr.Dropdown([g.name for g in GPUS], value=gpu, label="GPU", min_width=190),
        gr.Dropdown([s.name for s in SHAPES], value=shape, label="Model size", min_width=100),
        gr.Dropdown(_numbers(CONTEXTS), value=context, label="Context", min_width=130),
        gr.Dropdown(_numbers(BATCHES), value=batch, label="Batch", min_width=110),
        gr.Dropdown(_numbers(NODES), value=nodes, label="Nodes", min_width=110),
        gr.Dropdown(WHOSE, value=whose, label="Tokens a step", min_width=210),
    ]


def _numbers(values: tuple[int, ...]) -> list[tuple[str, str]]:
    return [(f"{value:,}", str(value)) for value in values]
