"""DFlashModel: the layers of a DFlash drafter, which fill a block of masked tokens in one pass.

DFlash (z-lab), JetSpec, DeepSpec and DSpark: the residual at several layers of the backbone is
fused to one row a token, whose keys and values every layer of the drafter reads as they are. A pass
has the root and masked tokens behind the text, and predicts what stands in their places.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.drafters.own_layers import (
    Fixed,
    Lent,
    attended,
    keys_and_values,
    own_cache,
    rows_of,
    scores_of,
)
from medusa_chat.decoding.kv_cache import KVCache


@dataclass(frozen=True)
class DFlashForm:
    """What a DFlash drafter computes, beside the shapes of its weights.

    taps: places in transformers' `hidden_states` that it reads. block: rows of a pass; mask: the
    token of all but the first. windows: of each layer how many tokens back it reads, None for all;
    is_causal: of each layer whether a row of the block sees only those before it. reads_root:
    whether each row predicts the token after it, so that the root's is read (DSpark); otherwise
    each masked row predicts its own token.
    """

    taps: tuple[int, ...]
    block: int
    mask: int
    windows: tuple[int | None, ...]
    is_causal: tuple[bool, ...]
    reads_root: bool = False

    @property
    def deepest(self) -> int:
        """Tokens that a pass drafts."""
        return self.block - (not self.reads_root)

    def turned_around(self) -> "DFlashForm":
        """The same, with the other reading of which rows of the block see each other: of its
        sliding layers where it has both kinds, otherwise of all."""
        is_mixed = len({window is None for window in self.windows}) == 2
        pairs = zip(self.windows, self.is_causal, strict=True)
        flipped = (c if is_mixed and window is None else not c for window, c in pairs)
        return replace(self, is_causal=tuple(flipped))


class Markov(nn.Module):
    """DSpark's term for neighbours: what the token before adds to the logits of the next one.
    before: Embedding [V, r] by the backbone's ids; after: Linear of r, to the drafter's tokens."""

    def __init__(self, before: nn.Embedding, after: nn.Linear) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, V_d]."""
        found = F.embedding(tokens.clamp(max=len(self.before.weight) - 1), self.before.weight)
        return scores_of(self.after, found)


class DFlashModel(nn.Module):
    """The drafter's modules. fc: Linear of the taps, [k d], to its width; hidden_norm: of what it
    gives; layers: stock ones of transformers; norm: the last one; table, head: its own embeddings
    and LM head, None where it reads those that are lent; markov: of DSpark, or None; vocabulary:
    tokens of the LM head; ids int64 [V_d]: the backbone's id of each of its tokens, None where they
    are the same."""

    def __init__(
        self,
        form: DFlashForm,
        decoder: Any,
        fc: nn.Linear,
        hidden_norm: nn.Module,
        norm: nn.Module,
        table: nn.Embedding | None,
        head: nn.Linear | None,
        markov: Markov | None,
        lent: Lent,
        vocabulary: int,
        ids: Tensor | None,
    ) -> None:
        super().__init__()
        self.form, self.fc, self.hidden_norm, self.norm = form, fc, hidden_norm, norm
        self.layers, self.rotary = decoder.layers, decoder.rotary_emb
        self.table, self.head, self.markov, self._lent = table, head, markov, lent
        self.vocabulary = vocabulary
        self.device, self.dtype = fc.weight.device, fc.weight.dtype
        self.ids: Tensor | None
        self.register_buffer("ids", ids, persistent=False)

    def cache(self, capacity: int) -> KVCache:
        """An empty cache of its layers."""
        return own_cache(self.layers, capacity, self.device, self.dtype)

    def read(self, taps: Tensor, cache: KVCache) -> None:
        """Add the backbone's taps [m, k, d] of the next tokens of the text to the cache."""
        start, count = cache.length, len(taps)
        cache.begin()
        fused = self.fc(taps.to(self.device, self.dtype).flatten(1))
        rows = self.hidden_norm(fused)
        places = torch.arange(start, start + count, device=self.device)
        angles = self.rotary(rows[None], places[None])
        for layer, kept in zip(self.layers, cache.layers.layers, strict=True):
            kept.update(*keys_and_values(layer.self_attn, rows, angles))
        cache.extend(count)

    def forward(self, root: int, cache: KVCache) -> Tensor:
        """The pass of one block behind the text in the cache -> of each of its rows the state that
        its LM head reads [block, w]. The cache's valid rows stay as they are."""
        length = cache.length
        places = torch.arange(length, length + self.form.block, device=self.device)
        tokens = self._block(torch.tensor([root], device=self.device))
        return self.filled(tokens, places, self.masks(places, length), cache)

    def behind(self, root: Tensor, length: Tensor, cache: KVCache, bucket: int) -> Tensor:
        """As `forward`, without waiting for the device: root, and the tokens in the cache, of which
        `bucket` places are read, int64 [1]."""
        places = length + torch.arange(self.form.block, device=self.device)
        masks = self.masks(places, length, bucket)
        return self.filled(self._block(root), places, masks, Fixed(cache, places, bucket))

    def _block(self, root: Tensor) -> Tensor:
        """The tokens of a block: the root, int64 [1], and masked ones."""
        masked = torch.full((self.form.block - 1,), self.form.mask, device=self.device)
        return torch.cat((root, masked))

    def filled(
        self, tokens: Tensor, places: Tensor, masks: list[Tensor], cache: KVCache | Fixed
    ) -> Tensor:
        """tokens, places int64 [n], of each layer a mask [n, s + n], additive -> [n, w]."""
        cache.begin()
        x = self._embedded(tokens)
        angles = self.rotary(x[None], places[None])
        for index, (layer, mask) in enumerate(zip(self.layers, masks, strict=True)):
            normed, four = layer.input_layernorm(x), mask[None, None]
            x = x + attended(layer.self_attn, normed, angles, four, cache, index)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = self.norm(x)
        return out

    def masks(
        self, places: Tensor, length: Tensor | int, bucket: int | None = None
    ) -> list[Tensor]:
        """Of each layer what is added to the scores of the block's rows at `places` int64 [n], over
        a text of `length` tokens and themselves, or the first `bucket` places of the cache:
        [n, s]."""
        made = {}
        columns = torch.arange(bucket or int(length) + len(places), device=self.device)
        distance, is_text = places[:, None] - columns, columns < length
        for key in set(zip(self.form.windows, self.form.is_causal, strict=True)):
            window, is_causal = key
            hidden = columns >= length + len(places)
            if window is not None:
                hidden = hidden | is_text & (distance >= window)
            if is_causal:
                hidden = hidden | (distance < 0)
            zeros = torch.zeros(distance.shape, dtype=self.dtype, device=self.device)
            made[key] = zeros.masked_fill(hidden, -torch.inf)
        pairs = zip(self.form.windows, self.form.is_causal, strict=True)
        return [made[pair] for pair in pairs]

    def scores(self, rows: Tensor) -> Tensor:
        """[n, w] -> the logits of its own tokens, without the term for neighbours: [n, V_d]."""
        return scores_of(self._lent.head if self.head is None else self.head, rows)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The rows of its own table, or the embeddings as the backbone reads them, with a family's
        scale: [n] -> [n, w]."""
        if self.table is not None:
            return rows_of(self.table, tokens).to(self.device, self.dtype)
        embedded: Tensor = self._lent.embedding(tokens).to(self.device, self.dtype)
        # Granite's decoder multiplies by it, not its embedding
        return embedded * float(getattr(self._lent.config, "embedding_multiplier", 1.0))
