"""Medusa: the heads as a drafter, a distribution for each depth from one hidden state."""

from typing import Any

from torch import Tensor

from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError


class Medusa:
    """The heads' predictions at the last certain position (Levels). The heads run there only, and
    only as many as are asked for."""

    kind = kinds.MEDUSA

    def __init__(self, heads: MedusaHeads, lm_head: Any, vocabulary: int) -> None:
        """lm_head: backbone.LogitHead, for heads that have none of their own."""
        self._heads, self._lm_head, self._vocabulary = heads, lm_head, vocabulary

    def require(self, tree: Tree) -> None:
        """Raises UsageError for a tree deeper than there are heads, or wider than the
        vocabulary."""
        if tree.depth > len(self._heads):
            raise UsageError(
                f"the tree has depth {tree.depth} and the checkpoint {len(self._heads)} heads: "
                f"choose a tree of depth {len(self._heads)} or less, or --tree auto"
            )
        if tree.width > self._vocabulary:
            raise UsageError(
                f"the tree needs {tree.width} predictions of a head and the vocabulary has "
                f"{self._vocabulary} tokens: choose a narrower tree, or --tree auto"
            )

    def guesses(
        self, hidden: Tensor, root: Tensor, depth: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Levels."""
        return self._heads.guesses(hidden, root, self._lm_head, depth, width)
