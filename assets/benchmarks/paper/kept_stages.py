"""Study "two-stage" on kept answers: Medusa-1, Medusa-2 in two stages and directly, equal steps.

Medusa, arXiv 2401.10774, 2.2.2 and Table 2. The backbone learns its own answers, so that a loss on
them would fall whatever is done to it; how far it moved from itself is measured instead.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from head_shapes import ALONE, HEADS
from kept_answers import (
    NODES,
    held_out_tokens_per_step,
    ranks_among,
    read_kept,
    states_before,
)
from paper_context import PaperContext

from medusa_chat.bench.rows import Row, row
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.examples import Example
from medusa_chat.training.joint import add_adapter, joint_loss, train_jointly
from medusa_chat.training.loss import HeadInputs, ShortVocabulary, cache_inputs, evaluate
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.trainer import new_heads, train_heads

STEPS = 60  # of every method; of two stages the first half trains the heads alone
LABELS, TOKENS = 384, 512  # of a batch of heads alone, and of both
LEARNT, HELD_OUT = 200, 24  # answers
RATE, WEIGHT = 5e-4, 0.2  # the adapter's rate and lambda_0 in the second of two stages
DIRECT_RATE, DIRECT_WEIGHT = 2e-3, 1.0


def two_stage(context: PaperContext) -> Iterator[Row]:
    """For each method the backbone's KL from itself before, and tokens a step, both on held-out
    answers of the backbone before. Heads without the root, as in the paper."""
    kept = read_kept(context)
    learnt, unseen = kept.learnt[:LEARNT], kept.held_out[:HELD_OUT]
    model = kept.backbone().requires_grad_(False).eval()
    short = kept.short(model)
    context.progress(f"hidden states of {len(learnt)} answers")
    cached = cache_inputs(model, HEADS, learnt, ALONE)
    first, whole = (_alone(model, short, learnt, cached, steps) for steps in (STEPS // 2, STEPS))
    states = states_before(model, unseen)
    tokens = held_out_tokens_per_step(ranks_among(short, whole, states), HEADS)
    note = f"{STEPS} steps of {LABELS} labels of the heads alone"
    yield from _rows("medusa-1", 0.0, tokens, tokens, note, len(unseen))
    staged = _joint(STEPS - STEPS // 2, RATE, WEIGHT)
    direct = _joint(STEPS, DIRECT_RATE, DIRECT_WEIGHT)
    fresh = new_heads(short.lm_head.linear, HEADS)
    for name, made, recipe in (
        ("medusa-2, two stages", first, staged),
        ("medusa-2, direct", fresh, direct),
    ):
        context.progress(name)
        moved, found = _jointly(kept.backbone(), short, deepcopy(made), learnt, unseen, recipe)
        steps = recipe.steps
        note = (
            f"{STEPS - steps} steps of {LABELS} labels of the heads alone, {steps} of both with "
            f"{TOKENS} tokens; lambda_0 {recipe.lambda0:g}, adapter's rate "
            f"{recipe.learning_rate:g}, heads' {recipe.head_learning_rate:g}"
        )
        yield from _rows(name, moved, found, tokens, note, len(unseen))


def _alone(
    model: Any, short: ShortVocabulary, learnt: Sequence[Example], cached: HeadInputs, steps: int
) -> MedusaHeads:
    """Heads that were trained alone."""
    made = new_heads(short.lm_head.linear, HEADS)
    recipe = replace(ALONE, max_steps=steps, batch_tokens=4 * LABELS, warmup_steps=steps // 8)
    for _ in train_heads(model, short.lm_head, made, learnt, recipe, cached=cached, short=short):
        pass
    return made.requires_grad_(False)


def _joint(steps: int, rate: float, weight: float) -> Recipe:
    return replace(
        ALONE,
        method="medusa-2",
        max_steps=steps,
        batch_tokens=TOKENS,
        warmup_steps=steps // 8,
        learning_rate=rate,
        head_learning_rate_multiplier=ALONE.head_learning_rate / rate,
        lambda0=weight,
        distill=True,
    )


def _jointly(
    model: Any,
    short: ShortVocabulary,
    made: MedusaHeads,
    learnt: Sequence[Example],
    unseen: Sequence[Example],
    recipe: Recipe,
) -> tuple[float, float]:
    """Train both -> (the backbone's KL from itself before, nats a token; tokens a step)."""
    wrapped, _ = add_adapter(model, recipe)
    for _ in train_jointly(wrapped, made, learnt, recipe, short=short):
        pass
    made.requires_grad_(False)
    loss = partial(joint_loss, wrapped, made, recipe=recipe, weight=1.0)
    moved = evaluate(loss, unseen, recipe, recipe.steps).lm_loss
    merged = wrapped.merge_and_unload().eval()
    ranks = ranks_among(short, made, states_before(merged, unseen))
    return moved or 0.0, held_out_tokens_per_step(ranks, HEADS)


def _rows(
    name: str, moved: float, tokens: float, alone: float, note: str, answers: int
) -> Iterator[Row]:
    note = f"{note}; {answers} held-out answers of the backbone before"
    yield row(f"{name}: KL from the backbone before", [moved], "nats/token", note=note)
    note = f"{note}; {NODES} nodes"
    yield row(name, [tokens], "tokens/step", "medusa-1", [alone], note)
