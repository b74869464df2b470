"""Fused layers: whole layers in fewer operators, with equal results."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.attention import OURS, fold


class LayerOps:
    """The operators between the products of a merged layer, by torch. A load on a CUDA device
    replaces them one by one by kernels (backends/fused_kernels.py)."""

    def add_norm(self, hidden: Tensor, delta: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        """hidden and delta [1, n, d] -> their sum, and its norm, in their dtype."""
        hidden = hidden + delta
        return hidden, norm(hidden)

    def turned(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], cache: Any, index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys by their positions, and write keys and values to the cache.

        qkv [1, n, (H + 2 H_kv) D]; cos and sin [1, n, R], the sign of rotate_half in sin, of the
        first R numbers of a head: those behind stay; heads: H and H_kv; index: of the layer in the
        cache (or None) -> queries [1, H, n, D], and keys and values [1, H_kv, s, D] to read, in the
        dtype of qkv.
        """
        whole, rotary = heads[0] + 2 * heads[1], cos.shape[-1]
        split = qkv.unflatten(-1, (whole, -1)).transpose(1, 2)  # [1, H + 2 H_kv, n, D]
        moved, rest = split[:, : sum(heads), :, :rotary], split[:, : sum(heads), :, rotary:]
        moved = torch.addcmul(moved * cos, torch.roll(moved, rotary // 2, -1), sin)
        query, key = (torch.cat((moved, rest), -1) if rest.numel() else moved).split(heads, 1)
        value = split[:, sum(heads) :]
        if cache is not None:
            key, value = cache.update(key, value, index)
        return query, key, value

    def gated(self, gate_up: Tensor) -> Tensor:
        """[..., 2 f], the gate's numbers first -> silu(gate) * up, [..., f] in the same dtype."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


TORCH = LayerOps()


class FusedLayer(nn.Module):
    """A decoder layer with its q, k, v and its gate and up projections merged.

    It works with the attention functions registered in attention.py. With any other it calls the
    stock layer, whose weights are views of the merged ones (in 4 bits its projections are
    `Outputs`). hidden [1, q, d] -> [1, q, d].
    """

    def __init__(
        self, layer: Any, qkv: nn.Module, out: nn.Module, gate_up: nn.Module, down: nn.Module
    ) -> None:
        """layer: the stock one, whose projections are the four linears now."""
        super().__init__()
        self.stock = layer
        attention = layer.self_attn
        self.config, self.index = attention.config, attention.layer_idx
        self.scaling, self.head_dim = attention.scaling, attention.head_dim
        self.heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.ops = LayerOps()
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down
        half = self.head_dim // 2
        sign = torch.tensor([-1.0] * half + [1.0] * half).to(self.before.weight)
        self.sign: Tensor  # of rotate_half
        self.register_buffer("sign", sign, persistent=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states [1, q, d], attention_mask as the attention function takes it,
        position_embeddings (cos, sin) [1, q, R], kwargs the stock layer's -> [1, q, d], all in the
        layer's dtype."""
        if self.config._attn_implementation not in OURS or position_embeddings is None:
            out: Tensor = self.stock(
                hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            return out
        cos, sin = position_embeddings
        angles = cos, self.signed(sin)
        hidden, delta = self.run(hidden_states, None, attention_mask, past_key_values, angles)
        return hidden + delta

    def run(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        mask: Tensor | None,
        cache: Any,
        angles: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """hidden [1, q, d] and what the layer before adds to it; angles: cos and signed sin
        [1, q, R] -> the same two after this layer, all in its dtype."""
        if delta is None:
            x = self.before(hidden)
        else:
            hidden, x = self.ops.add_norm(hidden, delta, self.before)
        read = self.ops.turned(self.qkv(x), *angles, self.heads, cache, self.index)
        mixed = OURS[self.config._attn_implementation](*read, mask, self.scaling)
        hidden, x = self.ops.add_norm(hidden, self.out(mixed.flatten(2)), self.after)
        return hidden, self.down(self.ops.gated(self.gate_up(x)))

    def signed(self, sin: Tensor) -> Tensor:
        """sin [1, q, R] with the sign of rotate_half."""
        beside = (self.head_dim - sin.shape[-1]) // 2
        return sin * (self.sign[beside:-beside] if beside else self.sign)


class FusedDecoder:
    """A stock decoder of merged layers, called without the wrappers around its forward pass
    (a tenth of a one-row step of a small model): embeddings, rotary angles, layers, norm."""

    def __init__(self, decoder: Any) -> None:
        self.stock = decoder
        config = decoder.config
        self.groups = config.num_attention_heads // config.num_key_value_heads

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor,
        use_cache: bool = True,
    ) -> Any:
        stock = self.stock
        if attention_mask.is_floating_point():
            attention_mask = fold(attention_mask, self.groups)  # for all layers
        hidden, delta = stock.embed_tokens(input_ids), None
        cos, sin = stock.rotary_emb(hidden, position_ids=position_ids)
        angles = cos, stock.layers[0].signed(sin)
        for layer in stock.layers:
            hidden, delta = layer.run(hidden, delta, attention_mask, past_key_values, angles)
        _, normed = layer.ops.add_norm(hidden, delta, stock.norm)
        return SimpleNamespace(last_hidden_state=normed)


def lean_decoder(decoder: Any) -> Any:
    """The decoder without its wrappers where every layer is merged and shares one mask of ours."""
    kinds = set(getattr(decoder.config, "layer_types", None) or ["full_attention"])
    layers = getattr(decoder, "layers", [])
    is_merged = len(layers) > 0 and all(isinstance(layer, FusedLayer) for layer in layers)
    fits = is_merged and decoder.config._attn_implementation in OURS and len(kinds) == 1
    return FusedDecoder(decoder) if fits else decoder
