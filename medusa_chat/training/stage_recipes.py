"""HeadRecipe and JointRecipe: the settings of one stage of a training, counted in steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadRecipe:
    """Settings of a Medusa-1 stage; the defaults suit heads that share the LM head.

    optimizer: "muon" uses Muon at learning_rate for the residual layers and AdamW at a tenth of it
    for biases and for LM heads of their own; "adamw" uses AdamW at learning_rate for all.
    batch_tokens: tokens of a batch, padding included; similar lengths are together. cache_hidden:
    run the backbone once over all examples, keep the hidden states (d values a label) and draw
    batches of batch_labels from them; otherwise run it at every step over a batch of batch_tokens.
    decay: the loss of head k (from 1) has the weight decay^k. evaluate_every, save_every: steps;
    both also happen after the last step.
    """

    steps: int = 500
    batch_tokens: int = 4096
    batch_labels: int = 1024
    cache_hidden: bool = True
    learning_rate: float = 2e-2
    warmup_steps: int = 20
    decay: float = 0.8
    weight_decay: float = 0.0
    evaluate_every: int = 100
    save_every: int = 100
    seed: int = 0
    optimizer: str = "muon"


@dataclass(frozen=True)
class JointRecipe:
    """Settings of a Medusa-2 stage. heads: settings of the heads, and the steps, batches and seed.

    learning_rate: the adapter's. lambda0: the weight of the heads' loss beside the backbone's,
    constant, or lambda0 x sin(pi/2 x step/steps) with the schedule "sine". distill: the backbone's
    loss is KL(backbone without the adapter || backbone with it), otherwise the cross-entropy of the
    data (Medusa, arXiv 2401.10774, 2.2.2 and 2.3.2). rank, alpha, dropout: the adapter's.
    """

    heads: HeadRecipe
    learning_rate: float = 1e-4
    lambda0: float = 0.2
    schedule: str = "constant"
    distill: bool = False
    rank: int = 32
    alpha: int = 16
    dropout: float = 0.05
