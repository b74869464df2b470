"""Pace: whether a tab shows answers slower than they come, and the nodes its show drafts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.messages import ModelInfo
from medusa_chat.runtime.session import Session
from medusa_chat.ui.page.inputs import Inputs

SHOW_NODES = 64  # of the demo's show: drafted in every step, whether they pay here or not


@dataclass(frozen=True)
class Pace:
    """nodes: drafted in every step of an answer "as a GPU would"; None: by the settings."""

    is_paced: bool = False
    nodes: int | None = None

    @classmethod
    def posted(cls, values: object) -> "Pace | None":
        """From what a browser posted; None where it is no pace."""
        if not isinstance(values, Mapping) or not isinstance(values.get("paced"), bool):
            return None
        nodes = values.get("nodes")
        if nodes is None:
            return cls(values["paced"])
        if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 < nodes <= MAX_NODES:
            return None
        return cls(values["paced"], nodes)

    def of(self, inputs: Inputs, model: ModelInfo | None) -> Inputs:
        """What was asked for, at this pace: nodes that were chosen in the settings stay, and a
        tree has no more than the model's."""
        settings = inputs.settings
        is_open = settings.nodes is None and settings.tree == "auto"
        if self.nodes and is_open and settings.drafter in (None, "medusa"):
            facts = model.tree_facts if model else None
            if facts is not None:
                nodes = min(self.nodes, len(facts.choices) + 1)
                settings = settings.resolved(nodes=nodes)
        return replace(inputs, settings=settings, is_paced=self.is_paced)


def is_demo(session: Session) -> bool:
    """Whether the model that is loaded, or comes, is the demo checkpoint."""
    model, load = session.state.model, session.requested
    return model.name == "demo" if model else load is not None and load.checkpoint == "demo"


def usual_pace(session: Session) -> Pace:
    """Of a tab that has chosen none: the demo's answers are shown as a GPU would give them."""
    return Pace(True, SHOW_NODES) if is_demo(session) else Pace()
