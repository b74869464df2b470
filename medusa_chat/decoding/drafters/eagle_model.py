"""EagleModel: the layers of an EAGLE drafter, which read the backbone's own states.

EAGLE (arXiv 2401.15077) reads the state after the backbone's final norm, EAGLE-3 (2503.01840) the
residual at several of its layers. Both predict a token from such a state and the token after it,
and feed their own output back where the backbone has none yet.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.drafters.own_layers import (
    Fixed,
    Lent,
    attended,
    own_cache,
    rows_of,
    scores_of,
)
from medusa_chat.decoding.kv_cache import KVCache


@dataclass(frozen=True)
class EagleForm:
    """What an EAGLE drafter computes, beside the shapes of its weights.

    taps: places in transformers' `hidden_states` that it reads, 0 the embeddings; empty for the
    state after the final norm (EAGLE-1), whose layer gets one sum of state and embedding in place
    of both side by side. is_normed_first: the normed state is what the first layer adds to.
    feeds_norm: the normed output is fed back (EAGLE-3.1).
    """

    taps: tuple[int, ...] = ()
    is_normed_first: bool = False
    feeds_norm: bool = False


class EagleModel(nn.Module):
    """The drafter's modules. fc: Linear of what is read, [k d] or [2 d], to its own width; norms:
    of the whole that `fc` reads or of each tap, or none; layers: stock ones of transformers, the
    first with wide products in EAGLE-3; width: numbers of a state, as they read it and feed it
    back; hidden_norm: of the state that it gets; norm: the last one, None in EAGLE-1; table, head:
    its own embeddings and LM head, None where it reads those that are lent; vocabulary: tokens of
    the LM head; ids int64 [V_d]: the backbone's id of each of its tokens, None where they are the
    same."""

    def __init__(
        self,
        form: EagleForm,
        decoder: Any,
        fc: nn.Linear,
        norms: list[nn.Module],
        hidden_norm: nn.Module | None,
        norm: nn.Module | None,
        table: nn.Embedding | None,
        head: nn.Linear | None,
        lent: Lent,
        vocabulary: int,
        ids: Tensor | None,
    ) -> None:
        super().__init__()
        self.form, self.fc, self.norms = form, fc, nn.ModuleList(norms)
        self.layers, self.rotary = decoder.layers, decoder.rotary_emb
        self.hidden_norm, self.norm = hidden_norm, norm
        self.table, self.head, self._lent = table, head, lent
        self.vocabulary, self.width = vocabulary, fc.out_features
        self.device, self.dtype = fc.weight.device, fc.weight.dtype
        self.ids: Tensor | None
        self.register_buffer("ids", ids, persistent=False)

    def cache(self, capacity: int) -> KVCache:
        """An empty cache of its layers."""
        return own_cache(self.layers, capacity, self.device, self.dtype)

    def fused(self, final: Tensor, taps: Tensor | None) -> Tensor:
        """The states [m, w] that the layers read for m tokens, of the backbone's final [m, d] or
        its taps [m, k, d]."""
        if not self.form.taps:
            return final.to(self.device, self.dtype)
        assert taps is not None
        read = taps.to(self.device, self.dtype)
        if len(self.norms) == 1:
            read = self.norms[0](read.flatten(1))
        elif self.norms:
            parts = zip(self.norms, read.unbind(1), strict=True)
            read = torch.stack([norm(part) for norm, part in parts], 1)
        out: Tensor = self.fc(read.flatten(1))
        return out

    def forward(
        self,
        states: Tensor,
        tokens: Tensor,
        places: Tensor,
        mask: Tensor | None,
        cache: KVCache | Fixed,
    ) -> tuple[Tensor, Tensor]:
        """One pass: states [n, w], each with the token after it, int64 [n], at `places` int64 [n];
        mask additive [n, s] over the cache's valid rows and these, None for a causal pass over the
        rows alone -> what is fed back [n, w], and log probabilities float32 [n, V_d]. Keys and
        values lie behind the cache's valid rows."""
        cache.begin()
        embedded = self._embedded(tokens)
        angles = self.rotary(states[None], places[None])
        four = None if mask is None else mask[None, None]
        hidden = states
        for index, layer in enumerate(self.layers):
            if index:
                x = layer.input_layernorm(hidden)
            elif self.form.taps:
                assert self.hidden_norm is not None
                normed = self.hidden_norm(hidden)
                x = torch.cat((layer.input_layernorm(embedded), normed), -1)
                hidden = normed if self.form.is_normed_first else hidden
            else:
                x = hidden = self.fc(torch.cat((embedded, hidden), -1))
            hidden = hidden + attended(layer.self_attn, x, angles, four, cache, index)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        last = hidden if self.norm is None else self.norm(hidden)
        head = self._lent.head if self.head is None else self.head
        scores = scores_of(head, last).log_softmax(-1)
        return last if self.form.feeds_norm else hidden, scores

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The rows of the table: [n] -> [n, d]."""
        table = self._lent.embedding if self.table is None else self.table
        return rows_of(table, tokens).to(self.device, self.dtype)
