"""How many kernels a recorded step launches, by layer and beside the layers: many small ones are
slow on a GPU, however fast each is. Counted on fake tensors, where nothing is computed."""

from collections import Counter

import pytest
from support.fake_device import fake_device
from support.operators import Operators
from support.recorded_steps import SETTINGS, TREES, step_of

LAYER = {"plain": 17, "tree": 19}  # four of them products
FIXED = {  # beside the layers, without and with details
    ("plain", "greedy"): (42, 57),
    ("plain", "sampled"): (151, 166),
    ("plain", "cut"): (164, 179),
    ("plain", "typical"): (79, 83),
    ("plain", "typical, cut"): (79, 83),
    ("tree", "greedy"): (66, 85),
    ("tree", "sampled"): (175, 194),
    ("tree", "cut"): (188, 207),
    ("tree", "typical"): (87, 95),
    ("tree", "typical, cut"): (87, 95),
}


def counted(layers, tree, details, asked) -> Counter[str]:
    with fake_device():
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


def test_an_added_operator_is_counted():
    with fake_device():
        step = step_of("llama", TREES["tree"])
        step.body()
        with Operators() as operators:
            step._state.hidden[:, 1:].unsqueeze(0).transpose(0, 1)
            assert not operators.found
            step._state.hidden.add(1).mul_(2)
    assert operators.found == {"add": 1, "mul_": 1}
