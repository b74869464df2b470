"""A recipe resolved into the settings of its stages, for the examples and the backbone at hand."""

from collections.abc import Sequence
from dataclasses import replace

from medusa_chat.training.data import Example, group_by_length
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.setup import TrainingSetup
from medusa_chat.training.stage_recipes import HeadRecipe, JointRecipe

CACHE_BYTES = {"cpu": 2_000_000_000, "cuda": 8_000_000_000}  # most memory of cached hidden states


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
