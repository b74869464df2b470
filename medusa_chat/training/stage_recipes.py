"""HeadRecipe and JointRecipe: the settings of one stage of a training, counted in steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from medusa_chat.training.data import Example, group_by_length
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.setup import TrainingSetup

CACHE_BYTES = {"cpu": 2_000_000_000, "cuda": 8_000_000_000}  # most memory of cached hidden states


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


def head_recipe(recipe: Recipe, examples: Sequence[Example], setup: TrainingSetup) -> HeadRecipe:
    """The settings of the heads' stage. Hidden states are cached where there is a second epoch and
    enough memory."""
    labels = sum(sum(example.is_label) for example in examples)
    base = HeadRecipe(
        batch_tokens=recipe.batch_tokens,
        batch_labels=max(recipe.batch_tokens // 4, 1),
        cache_hidden=_caches(recipe, labels, setup),
        learning_rate=recipe.head_learning_rate,
        decay=recipe.decay,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
        optimizer=recipe.optimizer,
    )
    in_epoch = max(labels // base.batch_labels, 1)  # about as many as batches of whole examples
    if not base.cache_hidden:
        in_epoch = len(group_by_length(examples, base.batch_tokens, base.seed))
    steps = recipe.max_steps or recipe.epochs * in_epoch
    interval = max(steps // 10, 1)
    return replace(
        base,
        steps=steps,
        warmup_steps=min(recipe.warmup_steps, steps // 4),
        evaluate_every=interval,
        save_every=min(interval, 100),
    )


def _caches(recipe: Recipe, labels: int, setup: TrainingSetup) -> bool:
    """Whether hidden states are to be cached."""
    width = setup.config.get_text_config().hidden_size * (2 if setup.precision != "fp32" else 4)
    is_asked = recipe.cache and recipe.method == "medusa-1" and recipe.epochs > 1
    return is_asked and labels * width <= CACHE_BYTES.get(setup.device.type, 0)


def joint_recipe(recipe: Recipe, heads: HeadRecipe) -> JointRecipe:
    """The settings of the stage that trains backbone and heads. heads: from head_recipe."""
    return JointRecipe(
        heads,
        *(recipe.learning_rate, recipe.lambda0, recipe.lambda0_schedule, recipe.distill),
        *(recipe.lora_rank, recipe.lora_alpha, recipe.lora_dropout),
    )
