"""How many kernels a recorded step launches, by layer and beside the layers: many small ones are
slow on a GPU, however fast each is. Counted on fake tensors, where nothing is computed."""

from collections import Counter

import pytest
from support.adopted import adopt_layer_kernels, adopt_split_attention
from support.fake_device import fake_device
from support.operators import Operators
from support.recorded_steps import SETTINGS, TREES, step_of

from medusa_chat.decoding.backends import layer_kernels, split_attention

LAYER = {"plain": 16, "tree": 18}  # four of them products
FIXED = {  # beside the layers, without and with details
    ("plain", "greedy"): (40, 55),
    ("plain", "sampled"): (149, 164),
    ("plain", "cut"): (162, 177),
    ("plain", "typical"): (77, 81),
    ("plain", "typical, cut"): (77, 81),
    ("tree", "greedy"): (64, 83),
    ("tree", "sampled"): (173, 192),
    ("tree", "cut"): (186, 205),
    ("tree", "typical"): (85, 93),
    ("tree", "typical, cut"): (85, 93),
}


def counted(layers, tree, details=False, asked=(), ours=(), **options) -> Counter[str]:
    """Kernels of one step by operator, and by name those of ours, which are counted in `ours`."""
    with fake_device():
        asked = dict(asked) | options
        step = step_of("llama", tree, details, num_hidden_layers=layers, **asked)
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
    two, three = (counted(n, TREES[tree], details, SETTINGS[kind]) for n in (2, 3))
    layer = three - two
    beside = two - layer - layer
    assert layer.total() <= LAYER[tree], dict(layer)
    assert beside.total() <= FIXED[tree, kind][details], dict(beside)


def in_a_layer(tree, *ours, **options) -> Counter[str]:
    two, three = (counted(n, TREES[tree], ours=ours, **options) for n in (2, 3))
    return three - two


@pytest.mark.parametrize("tree", TREES)
def test_attention_in_splits_needs_no_mask_and_copies_no_rows(monkeypatch, tree):
    """A layer has a kernel for the parts and one that merges them, instead of torch's attention
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
    ours = adopt_layer_kernels(monkeypatch, *layer_kernels.NAMES)
    split = adopt_split_attention(monkeypatch)
    layer = in_a_layer(tree, ours, split, implementation=split_attention.NAME)
    six = {"add_norm": 2, "turned": 1, "split": 1, "merge": 1, "gated": 1}
    assert layer == {"linear": 4, **six}


def test_an_added_operator_is_counted():
    with fake_device():
        step = step_of("llama", TREES["tree"])
        step.body()
        with Operators() as operators:
            step._state.hidden[:, 1:].unsqueeze(0).transpose(0, 1)
            assert not operators.found
            step._state.hidden.add(1).mul_(2)
    assert operators.found == {"add": 1, "mul_": 1}
