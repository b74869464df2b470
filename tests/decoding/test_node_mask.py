"""What a node sees, in words and in numbers: its definition, node by node."""

import pytest
import torch
from support.engines import TREES

from medusa_chat.decoding.attention import NodeMask, additive, sights
from medusa_chat.decoding.draft import TreeTensors
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.trees.shapes import cartesian

CPU = torch.device("cpu")
ALL = TREES | {"root": ROOT, "three words": cartesian(12, 10)}


def defined(tree: Tree, window: int | None, length: int) -> torch.Tensor:
    """The mask of numbers [n, length + n] node by node: the text, the ancestors, itself, of which
    the last `window` positions are seen."""
    mask = torch.full((len(tree), length + len(tree)), -torch.inf)
    positions = [*range(length), *(length + depth for depth in tree.depths)]
    for node, path in enumerate(tree.paths):
        for place in (*range(length), *(length + other for other in path)):
            if window is None or length + tree.depths[node] - positions[place] < window:
                mask[node, place] = 0
    return mask


@pytest.mark.parametrize("tree", ALL.values(), ids=ALL)
@pytest.mark.parametrize("window", [None, 1, 3, 8, 64])
@pytest.mark.parametrize("length", [0, 1, 7, 63, 130])
def test_words_and_numbers_say_what_a_mask_is(tree, window, length):
    tensors = TreeTensors.of(tree, CPU)
    wanted = defined(tree, window, length)
    mask = NodeMask.of(tensors, window)
    columns = torch.arange(length + len(tree) + 9)
    for behind in (length, torch.tensor([length])):
        words = mask.behind(behind)
        assert torch.equal(sights(words), mask.seen)
        given = words, mask.seen, columns, torch.float32
        found = additive(*given)
        assert window is not None or torch.equal(found, additive(*given, has_window=False))
        assert torch.equal(found[:, : len(wanted[0])], wanted)
        assert found[:, len(wanted[0]) :].isneginf().all()  # nothing behind the draft is seen
    assert words.shape == (len(tree), 2 + -(-len(tree) // 64))


def test_every_bit_of_a_word_is_used():
    words = NodeMask.of(TreeTensors.of(cartesian(*[1] * 63), CPU), None).words
    assert words[63, 2] == -1 and words[0, 2] == 1
