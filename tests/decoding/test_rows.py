"""On a CPU a row of a tree's pass has the bits of plain decoding's, so that 16 bits are exact."""

import pytest
import torch
from support.engines import PROMPT, TREES
from support.families import CONTEXT, FAMILIES, VOCABULARY, tiny

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.draft import TreeTensors
from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import ROOT, Tree

# Families whose products on AMX are not all torch's packed linears (experts, gpt2's Conv1D).
AMX_ROUNDS = {(family, torch.bfloat16) for family in ("gpt2", "afmoe", "qwen3-moe")}
WIDE = {"hidden_size": 1088, "intermediate_size": 1088, "initializer_range": 0.05, "head_dim": 8}


def plain_rows(backbone, path):
    """The logits of plain steps over the tokens of a path, which the cache holds afterwards."""
    one = TreeTensors.of(ROOT, backbone.device)
    for token in path:
        yield backbone.lm_head(backbone.run_tree(torch.tensor([token]), one))[0]
        backbone.cache.keep([0])


@torch.inference_mode()
def rows_that_differ(backbone, tree):
    """The nodes of a tree whose logits are not those of plain steps over their paths to the bit."""
    found = set()
    backbone.run_chunk(torch.tensor(PROMPT))
    tokens = [(11 * i + 5) % VOCABULARY for i in range(len(tree))]
    logits = backbone.lm_head(
        backbone.run_tree(torch.tensor(tokens), TreeTensors.of(tree, backbone.device))
    )
    for leaf in tree.leaves:
        path = tree.paths[leaf]
        backbone.cache.crop(len(PROMPT))
        rows = plain_rows(backbone, [tokens[node] for node in path])
        found |= {n for n, row in zip(path, rows, strict=True) if not torch.equal(row, logits[n])}
    backbone.cache.crop(0)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_tree_are_plain_rows_to_the_bit_in_16_bits(family, dtype):
    if (family, dtype) in AMX_ROUNDS and torch.cpu._is_amx_tile_supported():
        pytest.skip("torch rounds by the number of rows there: docs/limits.md")
    model = tiny(family, **WIDE).to(dtype)
    replace_submodules(model)
    backbone = Backbone(model, CONTEXT)
    for tree in (TREES["dense"], TREES["wide"]):
        assert not rows_that_differ(backbone, tree)


def test_so_are_rows_that_have_an_expert_for_themselves():
    model = tiny("mixtral", **WIDE | {"num_local_experts": 16}).bfloat16()
    backbone = Backbone(model, CONTEXT)
    for tree in (TREES["dense"], TREES["wide"]):
        assert not rows_that_differ(backbone, tree)


def test_a_tree_of_the_most_nodes_fits_behind_the_longest_text():
    """With experts every row of it is computed twice."""
    backbone = Backbone(tiny("mixtral").bfloat16(), CONTEXT)
    tree = Tree.from_choices((i,) for i in range(MAX_NODES - 1))
    ids = torch.arange(MAX_NODES) % VOCABULARY
    with torch.inference_mode():
        backbone.run_chunk(ids[:CONTEXT])
        assert backbone.run_tree(ids, TreeTensors.of(tree, ids.device)).isfinite().all()
