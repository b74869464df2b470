"""Padded rows: every step's pass has the same number of rows, so that plain decoding and a tree
compute the same logits for a token.

On a GPU in half precision a product of one row is summed in another order than one of sixteen, so
the text of `exact` may differ from plain decoding's where two tokens are nearly tied. With passes
of equal size, and attention that sums in fp64 ("medusa_steady"), it should not, where the prompt
was read in the same chunks: a later turn may find one token more or less in the cache. This does
not hold for mixtures of experts, where a product has as many rows as tokens were routed to an
expert, nor for families with an attention of their own. Plain decoding pays for the added rows.
"""

from functools import lru_cache

import torch
from torch import Tensor

from medusa_chat.decoding.drafters import TreeTensors
from medusa_chat.decoding.tree import Tree

FIRST = 1_000_000  # rank of the first added row, which no guess can have


def widened(tree: Tree, tensors: TreeTensors, rows: int) -> tuple[Tree, TreeTensors]:
    """The tree of n nodes and its constants, padded to m nodes, the next multiple of `rows`:
    parents and depths int64 [m], ancestors bool [m, m], paths int64 [n, depth + 1] as before.

    An added node has the root's position and sees itself alone. Raises UsageError where m is over
    MAX_NODES, which cannot be where `rows` divides MAX_NODES.
    """
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
    """tokens int64 [n] of a tree -> [rows]; added rows repeat the root's token."""
    if len(tokens) == rows:
        return tokens
    return torch.cat((tokens, tokens[:1].expand(rows - len(tokens))))
