"""Draft and Plan: what a step proposes, and what the host knows of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from medusa_chat.decoding.budget import BOTH
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.tree import Tree


@dataclass(frozen=True, eq=False)
class TreeTensors:
    """A tree and its constants on the device: parents, depths int64 [n] (the root's parent is 0);
    ancestors bool [n, n]: whether the row's node sees the column's; others bool [n, n]: whether the
    column's node is not on the path from the root's child to the row's node; paths int64
    [n, depth + 1]: the path to each node, padded with the root."""

    tree: Tree
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    others: Tensor
    paths: Tensor

    @classmethod
    @lru_cache(maxsize=32)
    def of(cls, tree: Tree, device: torch.device) -> "TreeTensors":
        """The constants of `tree` on `device`, cached: callers use the identity of this object as a
        key for what they prepared for the tree."""
        ancestors = torch.tensor(tree.ancestors, device=device)
        others = ancestors.logical_not()
        others[:, :1] = True
        padded = [[*path, *[0] * (tree.depth + 1 - len(path))] for path in tree.paths]
        rows = [0, *tree.parents[1:]], tree.depths, padded
        parents, depths, paths = (torch.tensor(row, device=device) for row in rows)
        return cls(tree, parents, depths, ancestors, others, paths)


@dataclass(frozen=True)
class Draft:
    """A proposal. tokens: int64 [n] on the device, the root first. tensors: its tree. shares: the
    drafter's probabilities [n] (undefined for the text's nodes), float32 on the device or on the
    host, or None. guesses, sources: see DraftRecord."""

    tokens: Tensor
    tensors: TreeTensors
    shares: Tensor | Sequence[float] | None = None
    guesses: tuple[tuple[int, ...], ...] = ()
    sources: tuple[Source | None, ...] = ()

    @property
    def tree(self) -> Tree:
        return self.tensors.tree


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The next draft as far as the host knows it.

    index int64 [n]: each node's place in [root, the `width` best guesses of the first of `heads`
    heads, of the second, ..., text]; None: the root alone. text int64 [t]: tokens from
    `Drafting.plan`, on the device. is_grown: `fill` selects some of the nodes, by numbers that it
    reads on the host. reason: why it has this many nodes (budget.py). sources: see DraftRecord.
    shares: see Draft, of nodes that are known already. passes: of the drafter, for its time.
    """

    tensors: TreeTensors
    index: Tensor | None = None
    width: int = 0
    is_grown: bool = False
    reason: str = ""
    heads: int = 0
    text: Tensor | None = None
    sources: tuple[Source | None, ...] = ()
    shares: Sequence[float] | None = None
    passes: float = 0.0

    @property
    def tree(self) -> Tree:
        return self.tensors.tree


def text_draft(plan: Plan, root: Tensor) -> Draft:
    """The draft of a plan whose tokens are known: root int64 [1], then those, if any."""
    tokens = root if plan.text is None else torch.cat((root, plan.text))
    return Draft(tokens, plan.tensors, plan.shares, sources=plan.sources)


@lru_cache(maxsize=64)
def indexed(
    tree: Tree, nodes: int, depth: int, device: torch.device
) -> tuple[TreeTensors, Tensor | None]:
    """The first `nodes` nodes no deeper than `depth`, and their Plan.index: int64 [n], None if only
    the root is left."""
    cut = tree.head(nodes).pruned(depth)
    places = zip(cut.depths, cut.ranks, strict=True)
    index = [0 if d == 0 else 1 + (d - 1) * tree.width + rank for d, rank in places]
    tensors = TreeTensors.of(cut, device)
    return tensors, torch.tensor(index, device=device) if len(cut) > 1 else None


def with_chain(
    tree: Tree, nodes: int, depth: int, tokens: Sequence[int], device: torch.device
) -> Plan:
    """The plan of the first `nodes` nodes no deeper than `depth`, which heads fill, with a chain of
    the text's tokens below the root. Chains of one length share the tensor `text`, which recorded
    steps read."""
    made = _with_chain(tree, nodes, depth, len(tokens), device)
    assert made.text is not None
    made.text.copy_(torch.tensor(tokens))
    return made


@lru_cache(maxsize=128)
@torch.inference_mode(False)  # its `text` is written everywhere, also in training
def _with_chain(tree: Tree, nodes: int, depth: int, count: int, device: torch.device) -> Plan:
    tensors, index = indexed(tree, nodes, depth, device)
    heads = tensors.tree
    own, width = len(heads), tree.width
    parents, ranks = (0, *range(own, own + count - 1)), (width, *[0] * (count - 1))
    root = torch.zeros(1, dtype=torch.long, device=device)
    by_heads: list[Source] = ["heads"] * (own - 1)
    by_text: list[Source] = ["text"] * count
    places = 1 + heads.depth * width + torch.arange(count, device=device)
    return Plan(
        shape_of((*heads.parents, *parents), (*heads.ranks, *ranks), device),
        index=torch.cat((root if index is None else index, places)),
        width=width,
        reason=BOTH,
        heads=heads.depth,
        passes=min(heads.depth, 1),
        text=torch.zeros(count, dtype=torch.long, device=device),
        sources=(None, *by_heads, *by_text),
    )


@lru_cache(maxsize=512)
def shape_of(parents: tuple[int, ...], ranks: tuple[int, ...], device: torch.device) -> TreeTensors:
    """The constants of a tree made for one step; a few shapes recur."""
    return TreeTensors.of(Tree(parents, ranks), device)
