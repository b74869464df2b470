"""What Medusa heads use besides their weights: a faster twin, and the embedding of the root."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class HeadsTwin(Protocol):
    """A faster implementation of MedusaHeads' methods of these names, for one position."""

    def hidden_states(self, hidden: Tensor, root: Tensor | None, heads: int) -> Tensor:
        """hidden [1, d], and root [1, d], the root's embedding, for heads that read it ->
        [heads, 1, d], in the dtype of the heads."""
        ...

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """[K, V] -> values, tokens int64 [K, count] and log(sum(exp)) float32 [K]."""
        ...


class RootEmbedding:
    """The backbone's embedding of roots, each vector scaled to a root mean square of 1, since
    models differ in the size of their embeddings. It holds no parameters of its own."""

    def __init__(self, embedding: nn.Module) -> None:
        """embedding: int64 [n] -> [n, d], the backbone's."""
        self._embed = embedding

    def __call__(self, roots: Tensor) -> Tensor:
        """roots int64 [n] -> [n, d] in the embedding's dtype."""
        with torch.no_grad():
            found: Tensor = self._embed(roots)
            return F.rms_norm(found, found.shape[-1:], eps=1e-8)
