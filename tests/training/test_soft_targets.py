"""Heads that learn what the backbone itself would say, instead of the one token that came."""

from dataclasses import replace

import pytest
import torch
from support.families import tiny

from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example, collate
from medusa_chat.training.events import TrainStep
from medusa_chat.training.hidden_states import cache_inputs
from medusa_chat.training.loss import IGNORED, SoftTargets, hidden_and_soft_targets, medusa_loss
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.stage_recipes import HeadRecipe
from medusa_chat.training.trainer import new_heads, train_heads

HEADS, COUNT = 3, 4
QUICK = HeadRecipe(
    steps=4, batch_labels=8, batch_tokens=64, evaluate_every=99, save_every=99, soft_targets=COUNT
)


@pytest.fixture(scope="module")
def model():
    return tiny("llama").eval()


@pytest.fixture(scope="module")
def examples(model):
    dice = torch.Generator().manual_seed(0)
    rows = torch.randint(3, model.config.vocab_size, (4, 14), generator=dice).tolist()
    return [
        Example(tuple(row), (False,) * 4 + (True,) * 10, f"row {i}") for i, row in enumerate(rows)
    ]


def random_heads(model):
    heads = new_heads(model.lm_head, HEADS)
    with torch.no_grad():
        heads.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return heads


def test_they_are_what_the_backbone_says_before_the_token_of_each_head(model, examples):
    batch = collate(examples[:1])
    hidden, roots, targets, _, soft = hidden_and_soft_targets(
        model, batch, HEADS, model.lm_head, COUNT
    )
    with torch.no_grad():
        shares = model(batch.ids).logits[0].softmax(-1)
    first = 3  # the first place that any head is asked at: the last token of the prompt
    for row in range(len(hidden)):
        for head in range(HEADS):
            if targets[row, head] == IGNORED:
                continue
            best = shares[first + row + head + 1].topk(COUNT)
            assert soft.tokens[row, head].tolist() == best.indices.tolist()
            wanted = best.values / best.values.sum()
            assert torch.allclose(soft.probabilities[row, head], wanted, atol=1e-5)


def test_certain_ones_are_the_hard_loss(model, examples):
    heads = random_heads(model)
    hidden, roots, targets, _, _ = hidden_and_soft_targets(
        model, collate(examples), HEADS, model.lm_head, 1
    )
    sure = SoftTargets(targets.clamp(min=0).int().unsqueeze(-1), torch.ones(*targets.shape, 1))
    hard = medusa_loss(heads, model.lm_head, hidden, roots, targets, rows_at_once=7)
    soft = medusa_loss(heads, model.lm_head, hidden, roots, targets, rows_at_once=7, soft=sure)
    assert torch.allclose(hard.losses, soft.losses) and torch.equal(hard.hits, soft.hits)
    assert torch.allclose(hard.total, soft.total)


def test_more_of_them_than_the_vocabulary_has_is_all_of_it(model, examples):
    many = model.config.vocab_size + 9
    *_, soft = hidden_and_soft_targets(model, collate(examples[:1]), HEADS, model.lm_head, many)
    assert soft.tokens.shape[-1] == many
    assert torch.allclose(soft.probabilities[0, 0].sum(), torch.tensor(1.0))


def trained(model, examples, recipe, state=None, steps=None):
    heads = new_heads(model.lm_head, HEADS)
    events = train_heads(model, model.lm_head, heads, examples, recipe, state=state)
    for event in events:
        if isinstance(event, TrainStep) and event.step == steps:
            events.close()
    return heads.weight


@pytest.mark.parametrize("cached", [True, False])
def test_a_run_that_was_cut_gives_the_same_bits(model, examples, tmp_path, cached):
    recipe = replace(QUICK, cache_hidden=cached)
    whole = trained(model, examples, recipe)
    state = tmp_path / "state.pt"
    trained(model, examples, recipe, state, steps=2)
    assert torch.equal(trained(model, examples, recipe, state), whole)
    hard = trained(model, examples, replace(recipe, soft_targets=0))
    assert not torch.equal(hard, whole)


def test_kept_rows_that_a_caller_gives_are_those_of_the_examples(model, examples):
    kept = cache_inputs(model, HEADS, examples, QUICK)
    heads = new_heads(model.lm_head, HEADS)
    for _ in train_heads(model, model.lm_head, heads, examples, QUICK, cached=kept):
        pass
    assert torch.equal(heads.weight, trained(model, examples, QUICK))


def test_they_are_refused_where_the_backbone_changes():
    with pytest.raises(UsageError, match="soft-targets work only with medusa-1"):
        Recipe(method="medusa-2", soft_targets=4)
    with pytest.raises(UsageError, match="soft-targets is 65"):
        Recipe(soft_targets=65)
