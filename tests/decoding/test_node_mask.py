"""What a node sees, in words: the same as in the mask that is as long as the text."""

import pytest
import torch
from support.engines import TREES, engine_of
from support.families import tiny

from medusa_chat.decoding.drafters import TreeTensors
from medusa_chat.decoding.node_mask import NodeMask, additive, sights
from medusa_chat.decoding.tree import ROOT, cartesian

CPU = torch.device("cpu")
ALL = TREES | {"root": ROOT, "three words": cartesian(12, 10)}


@pytest.fixture(scope="module")
def backbone():
    return engine_of(tiny("llama"), context=200).backbone


@pytest.mark.parametrize("tree", ALL.values(), ids=ALL)
@pytest.mark.parametrize("window", [None, 1, 3, 8, 64])
@pytest.mark.parametrize("length", [0, 1, 7, 63, 130])
def test_words_say_what_the_mask_of_operators_says(backbone, tree, window, length):
    tensors = TreeTensors.of(tree, CPU)
    backbone.cache.length = length
    wanted = backbone._tree_mask(tree, tensors, window)
    mask = NodeMask.of(tensors, window)
    columns = torch.arange(length + len(tree) + 9)
    for behind in (length, torch.tensor([length])):
        words = mask.behind(behind)
        given = words, sights(words), columns, torch.float32
        found = additive(*given)
        assert window is not None or torch.equal(found, additive(*given, has_window=False))
        assert torch.equal(found[:, : len(wanted[0])], wanted)
        assert found[:, len(wanted[0]) :].isneginf().all()  # nothing behind the draft is seen
    assert words.shape == (len(tree), 2 + -(-len(tree) // 64))


def test_every_bit_of_a_word_is_used():
    words = NodeMask.of(TreeTensors.of(cartesian(*[1] * 63), CPU), None).words
    assert words[63, 2] == -1 and words[0, 2] == 1
