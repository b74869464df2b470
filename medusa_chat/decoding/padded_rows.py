"""Steady: passes of one number of rows, whatever they decode, so that plain decoding and a tree
give a token the same numbers.

On a GPU in half precision a product of one row is summed in another order than one of sixteen: the
text of `exact` may part from plain decoding's where two tokens are as good as equal. In steps of as
many rows each, with attention that sums in fp64, it should not, where the prompt was read alike: a
later turn may find one token more or less in the cache. It does not hold for mixtures of experts,
whose products have as many rows as tokens came to an expert, nor where a family's attention is its
own. It costs plain decoding what the rows cost.
"""

from functools import lru_cache

import torch
from torch import Tensor

from medusa_chat.decoding.drafters import TreeTensors
from medusa_chat.decoding.tree import Tree

FIRST = 1_000_000  # rank of the first row that stands beside a tree: no guess has it


def widened(tree: Tree, tensors: TreeTensors, rows: int) -> tuple[Tree, TreeTensors]:
    """A tree of n nodes, with its tensors, and behind them as many others as it takes to a multiple
    of `rows`, each at the root's position and seen by itself alone; the paths stay those of the
    n. Raises UsageError for more than MAX_NODES, which rows that divide it never come to."""
    spare = -len(tree) % rows
    if not spare:
        return tree, tensors
    parents, depths = (
        torch.cat((t, t.new_zeros(spare))) for t in (tensors.parents, tensors.depths)
    )
    ancestors = torch.block_diag(
        tensors.ancestors, torch.eye(spare, dtype=torch.bool, device=parents.device)
    )
    return _wide(tree, spare), TreeTensors(parents, depths, ancestors.bool(), tensors.paths)


@lru_cache(maxsize=32)
def _wide(tree: Tree, spare: int) -> Tree:
    ranks = range(FIRST, FIRST + spare)
    return Tree((*tree.parents, *[0] * spare), (*tree.ranks, *ranks))


def filled(tokens: Tensor, rows: int) -> Tensor:
    """tokens [n] of a tree -> [rows], the root's in those beside it."""
    if len(tokens) == rows:
        return tokens
    return torch.cat((tokens, tokens[:1].expand(rows - len(tokens))))
