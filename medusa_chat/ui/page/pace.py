"""Pace: whether a tab shows answers as a GPU would give them, by which times, and its nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.runtime.session import Session
from medusa_chat.training.hardware import GPUS, PRECISIONS, SHAPES, step_seconds
from medusa_chat.ui.page.inputs import Inputs
from medusa_chat.ui.page.tree_view import short

SHOW_NODES = 64  # of the demo's show: drafted in every step, whether they pay here or not
LENGTH = 512  # tokens before the step
SIZES = (*range(1, 17), *range(20, 65, 4), 65, 80, 96, 128, 129, 192, 256)


@dataclass(frozen=True)
class Pace:
    """nodes: drafted in every step of an answer "as a GPU would"; None: by the settings. order:
    ms on the browser's clock when it was chosen."""

    is_paced: bool = False
    nodes: int | None = None
    order: float = field(default=0.0, compare=False)

    @classmethod
    def posted(cls, values: object, before: "Pace | None" = None) -> "Pace | None":
        """The pace that a browser posted; None where it is none. What was chosen before stays where
        it was chosen later: two requests may come in another order."""
        if not isinstance(values, Mapping) or not isinstance(values.get("paced"), bool):
            return None
        nodes, order = values.get("nodes"), values.get("order", 0.0)
        if nodes is not None and (type(nodes) is not int or not 1 < nodes <= MAX_NODES):
            return None
        if type(order) not in (int, float):
            return None
        is_late = before is not None and order < before.order
        return before if is_late else cls(values["paced"], nodes, order)

    def of(self, inputs: Inputs, session: Session) -> Inputs:
        """What was asked for, at this pace: nodes that were chosen in the settings stay, and a
        tree has no more than the model's. Of the demo all is known before it is loaded."""
        settings = inputs.settings
        is_open = settings.nodes is None and settings.tree == "auto"
        if self.nodes and is_open and settings.drafter in (None, "auto", "medusa"):
            model = session.state.model
            facts, is_coming = model.tree_facts if model else None, not model and is_demo(session)
            if facts is not None or is_coming:
                most = len(facts.choices) + 1 if facts else SHOW_NODES
                settings = replace(settings, nodes=min(self.nodes, most))
        return replace(inputs, settings=settings, is_paced=self.is_paced)


def is_demo(session: Session) -> bool:
    """Whether the model that is loaded, or comes, is the demo checkpoint."""
    model, load = session.state.model, session.lifecycle.requested
    return model.name == "demo" if model else load is not None and load.checkpoint == "demo"


def usual_pace(session: Session) -> Pace:
    """The pace of a tab that has chosen none: the demo's answers come as a GPU would give them."""
    return Pace(True, SHOW_NODES) if is_demo(session) else Pace()


def gpu_times() -> dict[str, Any]:
    """{"nodes": [n ...], "sizes", "gpus", "precisions": names, "ms": {"size|GPU|precision": [ms of
    a step of n nodes ...]}}; between two n the browser draws a line."""
    return {
        "nodes": SIZES,
        "sizes": [shape.name for shape in SHAPES],
        "gpus": [gpu.name for gpu in GPUS],
        "precisions": PRECISIONS,
        "ms": {
            f"{shape.name}|{gpu.name}|{precision}": [
                short(step_seconds(shape, gpu, precision, n, LENGTH) * 1000) for n in SIZES
            ]
            for shape in SHAPES
            for gpu in GPUS
            for precision in PRECISIONS
        },
    }
