"""How many kernels a recorded step launches, by layer and beside the layers: many small ones are
slow on a GPU, however fast each is. Counted on fake tensors, where nothing is computed."""

from collections import Counter

import pytest
from support.adopted import adopt_split_attention
from support.fake_device import fake_device
from support.operators import Operators
from support.recorded_steps import SETTINGS, TREES, step_of

from medusa_chat.decoding.backends import split_attention

LAYER = {"plain": 17, "tree": 19}  # four of them products
FIXED = {  # beside the layers, without and with details
    ("plain", "greedy"): (39, 54),
    ("plain", "sampled"): (148, 163),
    ("plain", "cut"): (161, 176),
    ("plain", "typical"): (76, 80),
    ("plain", "typical, cut"): (76, 80),
    ("tree", "greedy"): (63, 82),
    ("tree", "sampled"): (172, 191),
    ("tree", "cut"): (185, 204),
    ("tree", "typical"): (84, 92),
    ("tree", "typical, cut"): (84, 92),
}


def counted(layers, tree, details=False, asked=(), **options) -> Counter[str]:
    with fake_device():
        asked = dict(asked) | options
        step = step_of("llama", tree, details, num_hidden_layers=layers, **asked)
        step.body()
        with Operators() as operators:
            step.body()
    return operators.found


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("tree", TREES)
def test_a_step_launches_no_more_kernels_than_it_did(tree, kind, details):
    two, three = (counted(n, TREES[tree], details, SETTINGS[kind]) for n in (2, 3))
    layer = three - two
    beside = two - layer - layer
    assert layer.total() <= LAYER[tree], dict(layer)
    assert beside.total() <= FIXED[tree, kind][details], dict(beside)


@pytest.mark.parametrize("tree", TREES)
def test_attention_in_splits_needs_no_mask_and_copies_no_rows(monkeypatch, tree):
    """A layer has a kernel for the parts and one that merges them, instead of torch's attention
    and, in a tree, two copies of rows."""
    launched = adopt_split_attention(monkeypatch)
    after = []
    for layers in (2, 3):
        launched.clear()
        found = counted(layers, TREES[tree], implementation=split_attention.NAME)
        assert launched.total() == 2 * 2 * layers  # two bodies
        after.append(found.total() + launched.total() // 2)
    layer = after[1] - after[0]
    assert layer == LAYER["plain"] + 1
    assert after[0] - 2 * layer <= FIXED[tree, "greedy"][0] - 9


def test_an_added_operator_is_counted():
    with fake_device():
        step = step_of("llama", TREES["tree"])
        step.body()
        with Operators() as operators:
            step._state.hidden[:, 1:].unsqueeze(0).transpose(0, 1)
            assert not operators.found
            step._state.hidden.add(1).mul_(2)
    assert operators.found == {"add": 1, "mul_": 1}
