"""Steady: passes of one number of rows, so that plain decoding and a tree give a token the same
numbers.

On a GPU in half precision a product of one row is summed in another order than one of sixteen: the
text of `exact` may differ from plain decoding's where two tokens are as good as equal. In passes of
as many rows each, with attention that sums in fp64, it cannot. That costs plain decoding what the
rows cost.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from medusa_chat.decoding.drafters import TreeTensors
from medusa_chat.decoding.tree import Tree

FIRST = 1_000_000  # rank of the first row that stands beside a tree: no guess has it


@lru_cache(maxsize=32)
def widened(tree: Tree, rows: int, device: torch.device) -> tuple[Tree, TreeTensors]:
    """The tree and, behind its nodes, as many others beside the root, at its position, that it
    takes to a multiple of `rows`. None of them is seen by a node of the tree."""
    spare = -len(tree) % rows
    if not spare:
        return tree, TreeTensors.of(tree, device)
    ranks = range(FIRST, FIRST + spare)
    wide = Tree((*tree.parents, *[0] * spare), (*tree.ranks, *ranks))
    tensors = TreeTensors.of(wide, device)
    depths = tensors.depths.clone()
    depths[len(tree) :] = 0  # a learnt position behind the last there is would be an error
    return wide, replace(tensors, depths=depths)


def filled(tokens: Tensor, rows: int) -> Tensor:
    """tokens [n] of a tree -> [rows], the root's in those beside it."""
    if len(tokens) == rows:
        return tokens
    return torch.cat((tokens, tokens[:1].expand(rows - len(tokens))))
