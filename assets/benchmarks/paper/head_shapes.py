"""Study "heads" on kept answers: 1 to 5 heads, own or shared LM head, with and without the root.

Medusa, arXiv 2401.10774, 2.2.3 and Figure 3a, for a backbone whose vocabulary is too large to train
on whole: heads learn and draft the tokens of the shortlist. Trainings are short, and every row
tells how short; minimum and maximum of a row are over its seeds.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from kept_answers import (
    NODES,
    held_out_tokens_per_step,
    ranks_among,
    read_kept,
    states_before,
)
from paper_context import PaperContext

from medusa_chat.bench.rows import Row, row
from medusa_chat.training.loss import cache_inputs
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.trainer import new_heads, train_heads
from medusa_chat.units import number

HEADS = 5
SEEDS = (0, 1)
# the rate and the weight decay of the heads that come with medusa-chat
ALONE = Recipe(
    max_steps=150,
    batch_tokens=2048,  # 512 labels
    learning_rate=3.5e-3,
    head_learning_rate_multiplier=1.0,
    weight_decay=1.0,
)


def heads(context: PaperContext) -> Iterator[Row]:
    """Tokens a step on held-out answers, by kind and number of heads. Heads are trained five at a
    time on cached hidden states; fewer heads are the first of the five, since on a frozen backbone
    heads do not influence one another."""
    kept = read_kept(context)
    model = kept.backbone().requires_grad_(False).eval()
    short = kept.short(model)
    context.progress(f"hidden states of {len(kept.learnt)} answers")
    cached = cache_inputs(model, HEADS, kept.learnt, ALONE)
    states = states_before(model, kept.held_out)
    for has_root, is_own in product((True, False), (False, True)):
        kind = f"{'with' if has_root else 'without'} the root, {'own' if is_own else 'shared'}"
        found: dict[int, list[float]] = {count: [] for count in range(1, HEADS + 1)}
        for seed in SEEDS:
            context.progress(f"heads {kind} LM head, seed {seed}")
            embedding = model.get_input_embeddings() if has_root else None
            made = new_heads(short.lm_head.linear, HEADS, 1, is_own, embedding)
            recipe = replace(ALONE, seed=seed)
            for _ in train_heads(
                model, short.lm_head, made, kept.learnt, recipe, cached=cached, short=short
            ):
                pass
            ranks = ranks_among(short, made.requires_grad_(False), states)
            for count, values in found.items():
                values.append(held_out_tokens_per_step(ranks, count))
        size = number(sum(p.numel() for p in made.parameters()))
        note = (
            f"{ALONE.steps} steps of {ALONE.batch_labels} labels from {len(kept.learnt)} answers "
            f"with {len(cached.hidden)}; {size} parameters in five heads; {len(SEEDS)} seeds; "
            f"{NODES} nodes, {len(kept.held_out)} answers"
        )
        for count, values in found.items():
            name = f"{kind} LM head, {count} head{'s' * (count > 1)}"
            yield row(name, values, "tokens/step", note=note)
