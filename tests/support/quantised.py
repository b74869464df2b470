"""Quantised copies opened and read."""

from medusa_chat.checkpoints.load import load
from medusa_chat.messages import LoadRequest
from support.loading import answer


def opened(folder, precision):
    """The names of the phases, and the model."""
    phases = list(load(LoadRequest(str(folder), precision=precision)))
    return [phase.name for phase, _ in phases], phases[-1][1]


def texts(model):
    return [answer(model, drafter=drafter)[-1].token_ids for drafter in ("none", "medusa")]
