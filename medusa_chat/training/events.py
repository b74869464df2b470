"""Events of a training that need no tensors. The command line writes them as JSON by field."""

from dataclasses import dataclass

TopShares = tuple[tuple[float, ...], ...]  # [head][n - 1]: how often the token is in the top n


@dataclass(frozen=True)
class Stage:
    """A stage of the work begins."""

    name: str


@dataclass(frozen=True)
class Note:
    """What was decided or left out, in a line."""

    line: str


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step is done.

    losses, top: per head; top[k][n - 1] is the share of labels within the first n predictions of
    head k, n from 1 to 5. labels: of the first head. lm_loss: the backbone's own loss in nats a
    token, where the backbone is trained as well.
    """

    step: int
    steps: int
    loss: float
    losses: tuple[float, ...]
    top: TopShares
    labels: int
    learning_rate: float
    lm_loss: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """Losses and accuracies on the held-out examples after `step` steps, as in TrainStep."""

    step: int
    losses: tuple[float, ...]
    top: TopShares
    lm_loss: float | None = None


@dataclass(frozen=True)
class HiddenStates:
    """The backbone has run over `done` of `total` examples, whose hidden states are kept; tokens:
    of them so far."""

    done: int
    total: int
    tokens: int


@dataclass(frozen=True)
class Written:
    """The output is on the disk. bytes: its size; answers: the file of the backbone's answers."""

    folder: str
    bytes: int
    answers: str = ""
