"""What a training of heads is asked for, and what it tells while it goes."""

from dataclasses import dataclass

from torch import Tensor

Shares = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HeadRecipe:
    """Settings of a Medusa-1 run; its defaults suit heads that share the LM head.

    optimizer: "muon" with learning_rate for the residual layers and AdamW with other_learning_rate
    for biases and LM heads of their own, or "adamw" with learning_rate for all. batch_tokens counts
    padding. sequence_length: pack the examples into rows of that many ids (0: a row each, like
    lengths together). cache_hidden: run the backbone once over everything and keep its hidden
    states (d values a label), then take batches of batch_labels; else run it at every step over
    batches of batch_tokens. decay: the weight of head k (from 1) is decay^k. evaluate_every and
    save_every count steps; the last step does both. soft_targets: learn so many of the backbone's
    most probable tokens at each place instead of the one that came (0: that one).
    """

    steps: int = 500
    batch_tokens: int = 4096
    batch_labels: int = 1024
    cache_hidden: bool = True
    learning_rate: float = 2e-2
    other_learning_rate: float = 2e-3
    warmup_steps: int = 20
    decay: float = 0.8
    weight_decay: float = 0.0
    clip: float = 1.0
    rows_at_once: int = 512
    evaluate_every: int = 100
    save_every: int = 100
    seed: int = 0
    optimizer: str = "muon"
    sequence_length: int = 0
    soft_targets: int = 0


@dataclass(frozen=True)
class TrainStep:
    """One step done. Per head: losses, and top: how often the token was among its first 1 to 5
    predictions. lm_loss: the backbone's own, where that is trained as well."""

    step: int
    steps: int
    loss: float
    losses: tuple[float, ...]
    top: Shares
    labels: int
    learning_rate: float
    lm_loss: float | None = None

    @property
    def top1(self) -> tuple[float, ...]:
        """Share of labels that each head predicts right."""
        return tuple(row[0] for row in self.top)


@dataclass(frozen=True)
class Evaluated:
    """The held-out examples after `step` steps, per head as in TrainStep."""

    step: int
    losses: tuple[float, ...]
    top: Shares
    lm_loss: float | None = None

    @property
    def top1(self) -> tuple[float, ...]:
        """Share of labels that each head predicts right."""
        return tuple(row[0] for row in self.top)


def shares(hits: Tensor, labels: Tensor) -> Shares:
    """hits [K, R] of each rank alone, labels [K] -> how often the token was among the first."""
    found = hits.cumsum(-1) / labels.clamp(min=1).unsqueeze(-1)
    return tuple(tuple(row) for row in found.tolist())


@dataclass(frozen=True)
class JointRecipe:
    """Settings of a Medusa-2 run. heads: those of the heads, and steps, batches and seed.

    learning_rate: the adapter's. lambda0: the weight of the heads' loss beside the backbone's,
    from the first step, or with schedule "sine" lambda0 x sin(pi/2 x step/steps). distill: the
    backbone's loss is KL(itself without adapter || itself), else the cross-entropy of the data
    (Medusa, arXiv 2401.10774, 2.2.2 and 2.3.2).
    """

    heads: HeadRecipe
    learning_rate: float = 1e-4
    lambda0: float = 0.2
    schedule: str = "constant"
    distill: bool = False
    rank: int = 32
    alpha: int = 16
    dropout: float = 0.05
