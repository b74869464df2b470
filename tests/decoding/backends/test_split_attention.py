"""Attention in splits: the torch twin against plain attention. The kernel itself is
compared with the twin in test_kernels.py, and where there is a GPU in assets/benchmarks/gpu.py."""

import pytest
import torch
from support.bad_kernels import assert_bad_kernels_are_refused
from support.engines import PROMPT, decode, engine_of
from support.families import tiny

from medusa_chat.decoding.attention import tree_attention
from medusa_chat.decoding.backends import split_attention as splits
from medusa_chat.decoding.backends.split_twin import merge, split_attention
from medusa_chat.decoding.tree import cartesian


@pytest.mark.parametrize("keys", [1, 255, 256, 257, 900])
@pytest.mark.parametrize("groups", [1, 4])
def test_twin_gives_what_attention_gives(keys, groups):
    torch.manual_seed(keys)
    rows = min(5, keys)
    query = torch.randn(1, 2 * groups, rows, 16)
    key, value = torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)
    mask = torch.zeros(rows, keys)
    for row in range(rows):
        mask[row, keys - rows + row + 1 :] = -torch.inf
    mask[:, : keys // 2] = -torch.inf  # whole splits that no row sees, as a window leaves them
    wanted = tree_attention(query, key, value, mask[None, None], 0.25)
    folded = query[0].unflatten(0, (2, groups)).flatten(1, 2)
    found = split_attention(folded, key[0], value[0], mask, 0.25)
    found = found.unflatten(1, (groups, rows)).flatten(0, 1).transpose(0, 1).unsqueeze(0)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_split_that_is_not_seen_counts_nothing():
    outs = torch.tensor([[[[5.0]]], [[[7.0]]]])
    sums = torch.tensor([[[[0.0]]], [[[-torch.inf]]]])
    assert merge(outs, sums).item() == 5.0


def test_without_a_kernel_it_is_tree_attention():
    assert not splits.has_kernel(torch.device("cpu"))
    model = tiny("llama")
    tree = cartesian(3, 2)
    wanted = decode(engine_of(model), drafter=None, tree=tree)[-1].token_ids
    engine = engine_of(model, splits.NAME)
    assert engine.backbone.implementation == splits.NAME
    assert decode(engine, PROMPT, tree=tree)[-1].token_ids == wanted


def test_a_kernel_that_fails_or_is_wrong_is_said_once_and_not_used(monkeypatch, caplog):
    assert_bad_kernels_are_refused(splits, monkeypatch, caplog)
