"""How many kernels a recorded step launches, by layer and beside the layers: many small ones are
slow on a GPU, however fast each is. Counted on fake tensors, where nothing is computed."""

from collections import Counter

import pytest
import torch
from support.adopted import adopt_draw, adopt_layer_kernels, adopt_split_attention
from support.fake_device import fake_device
from support.operators import Operators
from support.recorded_steps import SETTINGS, TREES, step_of

from medusa_chat.decoding.backends import fused_kernels, split_attention

LAYER = {"plain": 16, "tree": 18}  # four of them products
FIXED = {  # beside the layers, without and with details
    ("plain", "greedy"): (40, 46),
    ("plain", "sampled"): (149, 155),
    ("plain", "cut"): (162, 168),
    ("plain", "min-p"): (153, 159),
    ("plain", "typical"): (64, 63),
    ("plain", "typical, cut"): (64, 63),
    ("tree", "greedy"): (58, 71),
    ("tree", "sampled"): (167, 180),
    ("tree", "cut"): (180, 193),
    ("tree", "min-p"): (171, 184),
    ("tree", "typical"): (79, 82),
    ("tree", "typical, cut"): (79, 82),
}


def counted(layers, tree, details=False, asked=(), ours=(), draws=False, **options) -> Counter[str]:
    """Kernels of one step by operator, and by name those of ours, which are counted in `ours`.
    draws: whether ours draws."""
    with fake_device():
        asked = dict(asked) | options
        step = step_of("llama", tree, details, num_hidden_layers=layers, **asked)
        ours = [*ours, adopt_draw(step._backbone)] if draws else ours
        step.body()
        for launched in ours:
            launched.clear()
        with Operators() as operators:
            step.body()
    return sum(ours, operators.found)


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("tree", TREES)
def test_a_step_launches_no_more_kernels_than_it_did(tree, kind, details):
    whole = counted(2, TREES[tree], details, SETTINGS[kind])
    assert whole.total() <= 2 * LAYER[tree] + FIXED[tree, kind][details], dict(whole)


def in_a_layer(tree, *ours, **options) -> Counter[str]:
    two, three = (counted(n, TREES[tree], ours=ours, **options) for n in (2, 3))
    return three - two


@pytest.mark.parametrize("tree", TREES)
def test_a_layer_launches_as_many_kernels_as_a_step_is_allowed_for_it(tree):
    layer = in_a_layer(tree)
    assert layer.total() == LAYER[tree], dict(layer)


@pytest.mark.parametrize("tree", TREES)
def test_attention_in_splits_needs_no_mask_and_copies_no_rows(monkeypatch, tree):
    """A layer has one kernel for the parts and one that merges them, instead of torch's attention
    and, in a tree, two copies of rows."""
    ours = adopt_split_attention(monkeypatch)
    layer = in_a_layer(tree, ours, implementation=split_attention.NAME)
    assert layer["split"] == layer["merge"] == 1 and layer.total() == LAYER["plain"] + 1
    whole = counted(2, TREES[tree], ours=[ours], implementation=split_attention.NAME)
    assert whole.total() - 2 * layer.total() <= FIXED[tree, "greedy"][0] - 9


@pytest.mark.parametrize(("name", "less"), [("add_norm", 2), ("turned", 5), ("gated", 1)])
def test_each_kernel_of_a_layer_takes_the_place_of_several(monkeypatch, name, less):
    layer = in_a_layer("tree", adopt_layer_kernels(monkeypatch, name))
    assert layer[name] >= 1 and layer.total() == LAYER["tree"] - less


@pytest.mark.parametrize("tree", TREES)
def test_a_layer_with_all_kernels_launches_six_beside_its_products(monkeypatch, tree):
    ours = adopt_layer_kernels(monkeypatch, *fused_kernels.IN_LAYERS)
    split = adopt_split_attention(monkeypatch)
    layer = in_a_layer(tree, ours, split, implementation=split_attention.NAME)
    six = {"add_norm": 2, "turned": 1, "split": 1, "merge": 1, "gated": 1}
    assert layer == {"linear": 4, **six}


@pytest.mark.parametrize("kind", ["sampled", "min-p"])
@pytest.mark.parametrize("tree", TREES)
def test_the_kernel_that_reads_logits_takes_the_place_of_many(tree, kind):
    """A draw is four: the place, the kernel, and the choice among the parts of a row. What is left
    out of the scores before it is torch's."""
    asked = TREES[tree], True, SETTINGS[kind]
    whole = counted(2, *asked)
    found = counted(2, *asked, draws=True)
    assert found["draw"] == 1 and found.total() == whole.total() - 104


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("tree", TREES)
def test_logits_in_fp32_cost_no_kernel(tree, kind):
    """Where a rule reads them in fp32 they save the one that converts them."""
    narrow, wide = (
        counted(2, TREES[tree], False, SETTINGS[kind], dtype=torch.float16, is_wide=is_wide)
        for is_wide in (False, True)
    )
    products = 1 if tree == "plain" else 2  # of the backbone, and of the heads
    assert wide["mm"] == narrow["mm"] + products
    assert wide.total() <= narrow.total() - (kind == "sampled")


def test_a_step_by_operators_turns_and_caches_in_one_kernel(monkeypatch):
    ours = adopt_layer_kernels(monkeypatch, "turned")
    with fake_device():
        step = step_of("llama", TREES["tree"])
        ours.clear()
        tensors = step._plan.tensors
        step._backbone.run_tree(tensors.depths, tensors)
    assert ours["turned"] == 2


def test_an_added_operator_is_counted():
    with fake_device():
        step = step_of("llama", TREES["tree"])
        step.body()
        with Operators() as operators:
            step._state.hidden[:, 1:].unsqueeze(0).transpose(0, 1)
            assert not operators.found
            step._state.hidden.add(1).mul_(2)
    assert operators.found == {"add": 1, "mul_": 1}
