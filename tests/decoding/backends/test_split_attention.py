"""Attention in splits by node masks: its torch twin against plain attention, in whole answers. The
kernel itself is compared with the twin in test_kernels.py, and where there is a GPU in
assets/benchmarks/gpu.py."""

from functools import partial

import pytest
import torch
from support.bad_kernels import assert_bad_kernels_are_refused
from support.engines import PROMPT, TREES, decode, engine_of
from support.families import FAMILIES, tiny
from support.graphs import answer, assert_same, settings_of

from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding import attention
from medusa_chat.decoding.attention import NodeMask, tree_attention
from medusa_chat.decoding.backends import split_attention as splits
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.draft import TreeTensors
from medusa_chat.decoding.families import needs_eager
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.trees.shapes import cartesian

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [0, 1, 255, 900])
@pytest.mark.parametrize("groups", [1, 4])
def test_twin_gives_what_attention_over_the_text_gives(length, groups):
    torch.manual_seed(length)
    tree = cartesian(2, 2)
    query = torch.randn(1, 2 * groups, len(tree), 16)
    key, value = torch.randn(2, 1, 2, length + 60, 16)
    tensors, count = TreeTensors.of(tree, CPU), length + len(tree)
    mask = torch.zeros(1, 1, len(tree), count)
    mask[..., length:].masked_fill_(~tensors.ancestors, -torch.inf)
    wanted = tree_attention(query, key[:, :, :count], value[:, :, :count], mask, 0.25)
    words = NodeMask.of(tensors, None).behind(length)
    assert torch.allclose(splits.reference(query, key, value, words, 0.25), wanted, atol=1e-5)


def is_ours(family):
    return not needs_eager(tiny(family))


@pytest.mark.parametrize("family", [name for name in FAMILIES if is_ours(name)])
def test_answers_by_node_masks_are_those_by_masks(family):
    """Every family passes a node mask to its attention as it is, recorded or not."""
    model = tiny(family)
    engine = engine_of(model)
    for tree in (ROOT, TREES["mc_sim_7b_63"]):
        model.set_attn_implementation("medusa_tree")
        draft = None
        if len(tree) > 1:
            draft = partial(engine.drafter, GenerationSettings(), tree)
        wanted = decode(engine, drafter=draft and draft(), tree=tree)[-1].token_ids
        ours = engine_of(model, splits.NAME)
        assert ours.backbone.takes_words
        check_steps(ours.backbone)
        assert decode(ours, drafter=draft and draft(), tree=tree)[-1].token_ids == wanted
        recorded = CudaGraphStep(ours.backbone)
        settings = settings_of(max_new_tokens=16, seed=11)
        found = answer(ours, recorded, tree, settings)
        assert found[-1].token_ids == wanted and recorded.seconds > 0


def test_one_recording_serves_all_lengths_and_makes_no_mask(monkeypatch):
    model = tiny("llama")
    replace_submodules(model)
    engine, settings = engine_of(model, context=700), settings_of(max_new_tokens=40)
    wanted = answer(engine, None, cartesian(2, 2), settings)
    engine.backbone.attend_by(splits.NAME)
    recorded, seen = CudaGraphStep(engine.backbone), set()
    real = attention.OURS[splits.NAME]

    def spy(query, key, value, mask, scaling=None, cap=None):
        if query.shape[2] == 7:  # the draft's, not the prompt's
            seen.add((mask.dtype, mask.shape, key.shape[2]))
        return real(query, key, value, mask, scaling)

    monkeypatch.setitem(attention.OURS, splits.NAME, spy)
    assert_same(answer(engine, recorded, cartesian(2, 2), settings), wanted)
    seen.clear()
    again = answer(engine, recorded, cartesian(2, 2), settings, prompt=PROMPT * 50)
    assert again[-1].reason == "length"
    assert [len(kind.steps) for kind in recorded._kinds.values()] == [1]
    assert seen == {(torch.int64, (1, 1, 7, 3), engine.backbone.cache.capacity)}


def test_a_mask_of_numbers_is_tree_attention():
    query, key, value = torch.randn(3, 1, 2, 5, 16)
    mask = torch.zeros(1, 1, 5, 5)
    for given in (mask, None):
        wanted = tree_attention(query, key, value, given)
        assert torch.equal(splits.split_tree_attention(query, key, value, given), wanted)


def test_a_kernel_that_fails_or_is_wrong_is_said_once_and_not_used(monkeypatch, caplog):
    own = (torch.float16, 64)
    assert_bad_kernels_are_refused(splits, monkeypatch, caplog, *own)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float16, 96), (torch.float64, 64)])
def test_heads_that_the_kernel_does_not_take_are_not_tried(monkeypatch, dtype, width):
    monkeypatch.setattr(splits, "difference", lambda *_: pytest.fail("it was tried"))
    assert not splits.has_kernel(torch.device("cuda"), dtype, width)
