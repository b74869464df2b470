"""Studies "heads" and "two-stage": heads trained in several ways for the loaded backbone.

Medusa, arXiv 2401.10774: 2.2.3 and Figure 3a, 2.2.2 and Table 2. Trainings are short, and every
row tells how short; minimum and maximum of a row are over its seeds.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.rows import Row, row
from medusa_chat.bench.studies.training_fixture import (
    NODES,
    TrainingFixture,
    held_out_loss,
    held_out_tokens_per_step,
    make_fixture,
    prompted_messages,
    ranks_of,
)
from medusa_chat.checkpoints.head_tensors import heads_of, tensors_of
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.data import Example
from medusa_chat.training.events import TrainStep
from medusa_chat.training.hidden_states import HeadInputs, cache_inputs
from medusa_chat.training.joint import train_jointly
from medusa_chat.training.lora import add_adapter
from medusa_chat.training.stage_recipes import HeadRecipe, JointRecipe
from medusa_chat.training.trainer import new_heads, train_heads
from medusa_chat.units import number

HEADS = 5
COUNTS = (3, 4, 5)
SEEDS = (0, 1)
ANSWERS_EACH = 2  # answers of each conversation that the heads are trained on
JOINT_STEPS = 40  # of backbone and heads together, after the steps of the heads alone
DIRECT_STEPS = 80  # of backbone and heads together from the start
JOINT_TOKENS = 512  # of a batch of both
JOINT_RATE = 5e-4  # learning rate of the backbone: a quarter of that of the heads' biases
DIRECT_RATE = 2e-3  # the same as that of the heads' biases
METHODS = (ALONE, STAGED, DIRECT) = "medusa-1", "medusa-2, two stages", "medusa-2, direct"
# the stage that trains the heads alone
MEDUSA_1 = HeadRecipe(steps=300, batch_labels=256, evaluate_every=10**9, save_every=10**9)


def heads(context: BenchContext) -> Iterator[Row]:
    """Own against shared LM head, 3, 4 and 5 heads, the data's answers against the backbone's own
    to the same prompts: tokens a step on the backbone's greedy answers to held-out prompts. Heads
    of one residual layer are trained five at a time on cached hidden states; fewer heads are the
    first of the five, since on a frozen backbone heads do not influence one another."""
    with TemporaryDirectory() as folder:
        fixture = make_fixture(context, Path(folder))
        model = fixture.backbone()
        tests = fixture.answers(model, prompted_messages(fixture.held_out), (0.0,), "held out")
        prompts_and_answers = prompted_messages(fixture.learnt, each=ANSWERS_EACH)
        own = fixture.answers(model, prompts_and_answers, (0.3, 0.0), "own")
        sets = {"training data": fixture.given(prompts_and_answers), "self-distilled": own}
        for data, examples in sets.items():
            context.progress(f"hidden states of the {data}")
            cached = cache_inputs(model, HEADS, examples, MEDUSA_1)
            yield from _kinds(context, model, data, examples, cached, tests)
        yield from _shipped(context, model, tests)


def _kinds(
    context: BenchContext,
    model: Any,
    data: str,
    examples: Sequence[Example],
    cached: HeadInputs,
    tests: Sequence[Example],
) -> Iterator[Row]:
    """The rows of one set of examples."""
    for is_own, kind in ((False, "shared"), (True, "own")):
        found: dict[int, list[float]] = {count: [] for count in COUNTS}
        for seed in SEEDS:
            context.progress(f"heads on {data}, {kind} LM head, seed {seed}")
            made = new_heads(model.get_output_embeddings(), HEADS, own_lm_head=is_own)
            _train_heads(model, made, examples, replace(MEDUSA_1, seed=seed), cached)
            ranks = ranks_of(model, made, tests)
            for count in COUNTS:
                found[count].append(held_out_tokens_per_step(ranks, count))
        size = sum(p.numel() for p in made.parameters())
        note = (
            f"{MEDUSA_1.steps} steps of {MEDUSA_1.batch_labels} labels from {len(examples)} "
            f"examples with {len(cached.hidden)}; {number(size)} parameters in five heads; "
            f"{len(SEEDS)} seeds; {NODES} nodes, {len(tests)} answers"
        )
        for count, values in found.items():
            name = f"{data}, {kind} LM head, {count} heads"
            yield row(name, values, "tokens/step", "medusa-chat bench --study heads", note=note)


def _train_heads(
    model: Any,
    made: MedusaHeads,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    cached: HeadInputs,
) -> None:
    for _ in train_heads(
        model, model.get_output_embeddings(), made, examples, recipe, cached=cached
    ):
        pass
    made.requires_grad_(False)


def _shipped(context: BenchContext, model: Any, tests: Sequence[Example]) -> Iterator[Row]:
    """The row of the checkpoint's own heads."""
    loaded = context.loaded.engine.heads
    assert loaded is not None
    tensors = {name: tensor.float() for name, tensor in tensors_of(loaded).items()}
    heads = heads_of(tensors).to(model.device)
    heads.read_roots(model.get_input_embeddings())
    ranks = ranks_of(model, heads, tests)
    values = [held_out_tokens_per_step(ranks, len(loaded))]
    note = f"as the checkpoint has them; {NODES} nodes, {len(tests)} answers"
    name = f"the checkpoint's own {len(loaded)} heads"
    yield row(name, values, "tokens/step", "medusa-chat bench --study heads", note=note)


def two_stage(context: BenchContext) -> Iterator[Row]:
    """Medusa-1 against Medusa-2, the latter in two stages and directly: the backbone's loss on
    held-out conversations, and tokens a step on the greedy answers of the trained backbone. The
    second stage begins with the heads of Medusa-1."""
    losses: dict[str, list[float]] = {name: [] for name in METHODS}
    rates: dict[str, list[float]] = {name: [] for name in METHODS}
    with TemporaryDirectory() as folder:
        fixture = make_fixture(context, Path(folder))
        learnt, unseen = fixture.examples(fixture.learnt), fixture.examples(fixture.held_out)
        model = fixture.backbone()
        before, asked = held_out_loss(model, unseen), prompted_messages(fixture.held_out)
        cached = cache_inputs(model, HEADS, learnt, MEDUSA_1)
        for seed in SEEDS:
            for name, trained, made in _trained(fixture, learnt, cached, seed):
                losses[name].append(held_out_loss(trained, unseen))
                answers = fixture.answers(trained, asked, (0.0,), f"{name} {seed}")
                rates[name].append(
                    held_out_tokens_per_step(ranks_of(trained, made, answers), HEADS)
                )
    yield from _two_stage_rows(fixture, before, losses, rates)


def _trained(
    fixture: TrainingFixture, learnt: Sequence[Example], cached: HeadInputs, seed: int
) -> Iterator[tuple[str, Any, MedusaHeads]]:
    """(name, backbone, heads) of each of METHODS."""
    progress = fixture.context.progress
    progress(f"{ALONE}, seed {seed}")
    model = fixture.backbone()
    first = new_heads(model.get_output_embeddings(), HEADS)
    _train_heads(model, first, learnt, replace(MEDUSA_1, seed=seed), cached)
    yield ALONE, model, first
    progress(f"{STAGED}, seed {seed}")
    recipe = _joint(seed, JOINT_STEPS, JOINT_RATE, MEDUSA_1.learning_rate / 4, 0.2)
    made = deepcopy(first)
    yield STAGED, _jointly(fixture.backbone(), made, learnt, recipe), made
    progress(f"{DIRECT}, seed {seed}")
    model = fixture.backbone()
    made = new_heads(model.get_output_embeddings(), HEADS)
    recipe = _joint(seed, DIRECT_STEPS, DIRECT_RATE, MEDUSA_1.learning_rate, 1.0)
    yield DIRECT, _jointly(model, made, learnt, recipe), made


def _two_stage_rows(
    fixture: TrainingFixture,
    before: float,
    losses: dict[str, list[float]],
    rates: dict[str, list[float]],
) -> Iterator[Row]:
    command = "medusa-chat bench --study two-stage"
    alone = f"{MEDUSA_1.steps} steps of the heads alone"
    both = f"steps of both, {JOINT_TOKENS} tokens each"
    notes = {
        ALONE: alone,
        STAGED: f"{alone}, {JOINT_STEPS} {both}; lambda_0 0.2, backbone's rate {JOINT_RATE:g}",
        DIRECT: f"{DIRECT_STEPS} {both}; lambda_0 1, backbone's rate {DIRECT_RATE:g}",
    }
    seeds = f"; {len(SEEDS)} seeds, {len(fixture.learnt)} conversations to learn from"
    base = "the backbone before"
    unseen = f"{len(fixture.held_out)} conversations"
    yield row(f"{base}: loss", [before], "nats/token", command, note=f"held-out: {unseen}")
    for name, values in losses.items():
        against = [before] * len(values)
        note = notes[name] + seeds
        yield row(f"{name}: loss", values, "nats/token", command, base, against, note)
    for name, values in rates.items():
        note = f"{notes[name]}{seeds}; {NODES} nodes, greedy answers to {unseen}"
        yield row(name, values, "tokens/step", command, ALONE, rates[ALONE], note)


def _joint(seed: int, steps: int, rate: float, head_rate: float, lambda0: float) -> JointRecipe:
    recipe = HeadRecipe(
        steps=steps,
        batch_tokens=JOINT_TOKENS,
        cache_hidden=False,
        warmup_steps=steps // 8,
        learning_rate=head_rate,
        other_learning_rate=head_rate / 10,
        evaluate_every=10**9,
        save_every=10**9,
        seed=seed,
    )
    return JointRecipe(recipe, learning_rate=rate, lambda0=lambda0)


def _jointly(
    model: Any, made: MedusaHeads, examples: Sequence[Example], recipe: JointRecipe
) -> Any:
    """Train both. Returns the backbone with the adapter merged into it."""
    wrapped, _ = add_adapter(model, recipe)
    for event in train_jointly(wrapped, made, examples, recipe):
        assert isinstance(event, TrainStep)
    made.requires_grad_(False)
    return wrapped.merge_and_unload().eval()
