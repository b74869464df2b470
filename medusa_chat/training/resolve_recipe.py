"""A recipe in steps, for the examples and the backbone at hand."""

from collections.abc import Sequence
from dataclasses import replace

from medusa_chat.training.data import Example
from medusa_chat.training.joint import JointRecipe
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.setup import TrainingSetup
from medusa_chat.training.trainer import HeadRecipe, epoch_batches

CACHE_BYTES = {"cpu": 2_000_000_000, "cuda": 8_000_000_000}  # of hidden states that are kept


def head_recipe(recipe: Recipe, examples: Sequence[Example], setup: TrainingSetup) -> HeadRecipe:
    """The recipe in steps. The hidden states are kept where there is room and a second epoch."""
    rate = recipe.head_learning_rate
    width = setup.config.get_text_config().hidden_size * (2 if setup.precision != "fp32" else 4)
    width += recipe.heads * recipe.soft_targets * 8  # a token and its share
    labels = sum(sum(example.is_label) for example in examples)
    room = CACHE_BYTES.get(setup.device.type, 0)
    caches = recipe.cache and recipe.method == "medusa-1" and recipe.epochs > 1
    first = HeadRecipe(
        batch_tokens=recipe.batch_tokens,
        batch_labels=max(recipe.batch_tokens // 4, 1),
        cache_hidden=caches and labels * width <= room,
        learning_rate=rate,
        other_learning_rate=rate / 10,
        warmup_steps=recipe.warmup_steps,
        decay=recipe.decay,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
        optimizer=recipe.optimizer,
        soft_targets=recipe.soft_targets,
        sequence_length=min(setup.length, recipe.batch_tokens) if setup.packs else 0,
    )
    steps = recipe.max_steps or recipe.epochs * steps_an_epoch(first, examples, labels)
    often = max(steps // 10, 1)
    warmup = min(recipe.warmup_steps, steps // 4)
    return replace(
        first, steps=steps, warmup_steps=warmup, evaluate_every=often, save_every=min(often, 100)
    )


def steps_an_epoch(recipe: HeadRecipe, examples: Sequence[Example], labels: int) -> int:
    """Batches of an epoch; of kept hidden states there are about as many as labels."""
    if recipe.cache_hidden:
        return max(labels // recipe.batch_labels, 1)
    return len(epoch_batches(examples, recipe, 0))


def joint_recipe(recipe: Recipe, heads: HeadRecipe) -> JointRecipe:
    return JointRecipe(
        heads=replace(heads, cache_hidden=False),
        learning_rate=recipe.learning_rate,
        lambda0=recipe.lambda0,
        schedule=recipe.lambda0_schedule,
        distill=recipe.distill,
        rank=recipe.lora_rank,
        alpha=recipe.lora_alpha,
        dropout=recipe.lora_dropout,
    )
