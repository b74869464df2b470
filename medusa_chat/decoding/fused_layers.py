"""Fused layers: whole layers in fewer operators, with equal results."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.attention import OURS, fold, tree_attention
from medusa_chat.decoding.layer_forms import (
    ExpertsForm,
    LayerForm,
    angles_of,
    embedding_scale,
    mixture_of,
    norms_around,
    router_of,
    whole_angles,
)


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


class Joined(nn.Module):
    """Several linears with one input, called as one: [..., K] -> their outputs side by side."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., the sum of their N], in the dtype of `hidden`."""
        return torch.cat([part(hidden) for part in self.parts], -1)


class Mixture(nn.Module):
    """A router and its experts, scored in fp32: [1, n, d] -> [1, n, d] in the same dtype."""

    def __init__(self, stock: Any) -> None:
        """stock: the block of a layer of transformers."""
        super().__init__()
        self.form, self.router, self.experts = (
            ExpertsForm.of(stock),
            router_of(stock),
            stock.experts,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, n, d] -> [1, n, d]."""
        rows, bias = hidden[0], getattr(self.router, "bias", None)
        bias = None if bias is None else bias.float()
        scores = F.linear(rows.float(), self.router.weight.float(), bias)
        experts, shares = self.form.choice(scores)
        mixed: Tensor = self.experts(rows, experts, shares.to(rows.dtype))
        return mixed[None]


class FusedLayer(nn.Module):
    """A decoder layer with its q, k, v and its gate and up projections called as one each.

    It works with the attention functions registered in attention.py. With any other it calls the
    stock layer, which shares its weights. form: what it computes; beside: a norm of the tokens'
    embeddings, which then stand before the normed states in what q, k and v read (a drafter's
    layer: only the pass in C has it). hidden [1, q, d] -> [1, q, d].
    """

    def __init__(
        self,
        layer: Any,
        qkv: nn.Module,
        out: nn.Module,
        gate_up: nn.Module | None,
        down: nn.Module | None,
    ) -> None:
        """layer: the stock one, whose projections are the four linears now; the last two are None
        where it has experts."""
        super().__init__()
        self.stock = layer
        attention = layer.self_attn
        self.config, self.index, self.form = (
            attention.config,
            attention.layer_idx,
            LayerForm.of(layer),
        )
        self.ops = LayerOps()
        self.before, self.mixed, self.after, self.fed = norms_around(layer)
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        self.value_norm = getattr(attention, "v_norm", None)
        self.own_gate = getattr(layer, "per_layer_input_gate", None)
        self.own_out = getattr(layer, "per_layer_projection", None)
        self.own_norm = getattr(layer, "post_per_layer_input_norm", None)
        self.beside: nn.Module | None = None
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down
        self.mixture = Mixture(mixture_of(layer)) if gate_up is None else None
        half = self.form.width // 2
        sign = torch.tensor([-1.0] * half + [1.0] * half).to(self.before.weight)
        self.sign: Tensor  # of rotate_half
        self.register_buffer("sign", sign, persistent=False)

    def forward(
        self,
        hidden_states: Tensor,
        *own: Tensor | None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states [1, q, d], own [1, q, p] of a layer that has inputs of its own,
        attention_mask as the attention function takes it, position_embeddings (cos, sin) [1, q, R],
        position_ids int64 [1, q], kwargs the stock layer's -> [1, q, d], all in the layer's
        dtype."""
        if self.config._attn_implementation not in OURS or position_embeddings is None:
            out: Tensor = self.stock(
                hidden_states,
                *own,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                **kwargs,
            )
            return out
        angles = self.signed(whole_angles(position_embeddings, self.form))
        hidden, delta = self.run(
            hidden_states,
            None,
            attention_mask,
            past_key_values,
            angles,
            position_ids,
            kwargs.get("shared_kv_states"),
            *own,
        )
        return hidden + delta

    def run(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        mask: Tensor | None,
        cache: Any,
        angles: tuple[Tensor, Tensor],
        positions: Tensor | None,
        shared: Any = None,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [1, q, d] and what the layer before adds to it; angles: cos and signed sin
        [1, q, R]; positions int64 [1, q], of a layer whose queries grow with them; shared: keys and
        values by kind of layer, which later layers read; own [1, q, p]: see forward -> the same two
        after this layer, all in its dtype."""
        if delta is None:
            x = self.before(hidden)
        else:
            hidden, x = self.ops.add_norm(hidden, delta, self.before)
        form = self.form
        query, key, value = self._attended(self._heads_normed(self.qkv(x)), angles, cache, shared)
        if form.growth is not None and positions is not None:
            query = query * form.growth_at(positions)[:, None, :, None].to(query.dtype)
        if form.has_sinks:
            sinks = self.stock.self_attn.sinks
            mixed = tree_attention(query, key, value, mask, form.scaling, form.cap, sinks)
        else:
            attend = OURS[self.config._attn_implementation]
            mixed = attend(query, key, value, mask, form.scaling, form.cap)
        delta = self._added(self.out(mixed.flatten(2)), self.mixed)
        hidden, x = self.ops.add_norm(hidden, delta, self.after)
        delta = self._added(self._fed(x), self.fed)
        if self.own_gate is not None and self.own_out is not None and own is not None:
            hidden = hidden + delta
            gate = F.gelu(self.own_gate(hidden), approximate="tanh")
            delta = self._added(self.own_out(gate * own), self.own_norm)
        scale = getattr(self.stock, "layer_scalar", None)
        return (hidden, delta) if scale is None else (hidden * scale, delta * scale)

    def _attended(
        self, qkv: Tensor, angles: tuple[Tensor, Tensor], cache: Any, shared: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See LayerOps.turned; keys and values may be those of a layer before."""
        form = self.form
        if form.source is not None:
            query, _, _ = self.ops.turned(qkv, *angles, (form.heads[0], 0), None, self.index)
            return query, *shared[form.kind]
        found = self.ops.turned(qkv, *angles, form.heads, cache, self.index)
        if shared is not None:
            shared[form.kind] = found[1:]
        return found

    def _fed(self, x: Tensor) -> Tensor:
        """What the gated products, or the experts, make of x [1, q, d]."""
        if self.mixture is not None:
            mixed: Tensor = self.mixture(x)
            return mixed
        assert self.gate_up is not None and self.down is not None
        out: Tensor = self.down(self._gated(self.gate_up(x)))
        return out

    def _heads_normed(self, qkv: Tensor) -> Tensor:
        """qkv [1, q, N] of the linears that there are -> [1, q, (H + 2 H_kv) D], or queries alone,
        with the heads normed that are."""
        if self.query_norm is None:
            return qkv
        split = qkv.split(self.form.outputs, -1)
        heads = [part.unflatten(-1, (-1, self.form.width)) for part in split]
        found = [self.query_norm(heads[0])]
        if self.key_norm is not None and len(heads) > 1:
            value = heads[-1]
            found += [self.key_norm(heads[1])]
            found += [value if self.value_norm is None else self.value_norm(value)]
        return torch.cat(found, -2).flatten(-2)

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.form.gate == "silu":
            return self.ops.gated(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def _added(self, delta: Tensor, norm: Any) -> Tensor:
        """What goes to the residual [1, q, d] of a sum as wide."""
        delta = delta if norm is None else norm(delta)
        return delta if self.form.residual == 1 else delta * self.form.residual

    def signed(self, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin [1, q, R], the latter with the sign of rotate_half; of a layer that turns
        nothing, those of no turn."""
        cos, sin = angles
        if not self.form.is_turned:
            return torch.ones_like(cos), torch.zeros_like(sin)
        beside = (self.form.width - sin.shape[-1]) // 2
        return cos, sin * (self.sign[beside:-beside] if beside else self.sign)


class FusedDecoder:
    """A stock decoder of merged layers, called without the wrappers around its forward pass
    (a tenth of a one-row step of a small model): embeddings, rotary angles, layers, norm."""

    def __init__(self, decoder: Any) -> None:
        self.stock = decoder
        self._tapped: dict[int, Tensor] = {}
        self._taps: Sequence[int] = ()

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the states behind these layers, counted from 0, of every pass from now on."""
        self._taps = layers

    @property
    def tapped(self) -> Tensor:
        """[n, k, d] of the last pass, see `tap`."""
        return torch.stack([self._tapped[layer] for layer in self._taps], 1)

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor | dict[str, Tensor],
        use_cache: bool = True,
    ) -> Any:
        hidden = self.stock.embed_tokens(input_ids)
        if (factor := getattr(self.stock, "embedding_multiplier", 1.0)) != 1:
            hidden = hidden * factor
        own = self.own_inputs(input_ids, hidden)
        return self.run(hidden, position_ids, past_key_values, attention_mask, own)

    def own_inputs(self, input_ids: Tensor, hidden: Tensor) -> Tensor | None:
        """What each layer reads of a token beside its input, [1, n, L, p]; None for nothing.
        input_ids int64 [1, n], hidden [1, n, d]: their embeddings."""
        if not getattr(self.stock, "hidden_size_per_layer_input", 0):
            return None
        rows = self.stock.get_per_layer_inputs(input_ids, None)
        own: Tensor = self.stock.project_per_layer_inputs(hidden, rows)
        return own

    def run(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor | dict[str, Tensor],
        own: Tensor | None = None,
        only: int | None = None,
    ) -> Any:
        """The pass from embeddings [1, n, d] on, in their dtype. attention_mask: one, or one by
        kind of layer; own: see own_inputs; only: the number of the one layer that is passed."""
        layers: Any = self.stock.layers
        is_one = isinstance(attention_mask, Tensor)
        given = {"": attention_mask} if isinstance(attention_mask, Tensor) else attention_mask
        masks: dict[tuple[Any, int], Tensor] = {}
        angles: dict[tuple[Any, bool], tuple[Tensor, Tensor]] = {}
        shared: dict[Any, tuple[Tensor, Tensor]] = {}
        delta = None
        for number, layer in enumerate(layers):
            if only not in (None, number):
                continue
            form = layer.form
            if (form.kind, form.is_turned) not in angles:
                found = angles_of(self.stock.rotary_emb, hidden, position_ids, form)
                angles[form.kind, form.is_turned] = layer.signed(found)
            seen = "" if is_one else form.kind, form.heads[0] // form.heads[1]
            if seen not in masks:
                mask = given[seen[0]]
                masks[seen] = fold(mask, seen[1]) if mask.is_floating_point() else mask
            hidden, delta = layer.run(
                hidden,
                delta,
                masks[seen],
                past_key_values,
                angles[form.kind, form.is_turned],
                position_ids,
                shared,
                None if own is None else own[:, :, number],
            )
            if number in self._taps:
                self._tapped[number] = (hidden + delta)[0]
        _, normed = layer.ops.add_norm(hidden, delta, self.stock.norm)
        return SimpleNamespace(last_hidden_state=normed)

    def embedded(self, input_ids: Tensor) -> Tensor:
        """The embeddings of input_ids int64 [1, n] in fp32, scaled and not rounded, [1, n, d]."""
        table: Any = self.stock.embed_tokens
        is_packed = hasattr(table, "rows")
        rows = table.rows(input_ids) if is_packed else F.embedding(input_ids, table.weight)
        return rows.float() * embedding_scale(self.stock)


def are_merged(decoder: Any) -> bool:
    """Whether all layers of a decoder are merged."""
    layers = getattr(decoder, "layers", [])
    return len(layers) > 0 and all(isinstance(layer, FusedLayer) for layer in layers)


def lean_decoder(decoder: Any) -> Any:
    """The decoder without its wrappers where every layer is merged and attends by ours."""
    fits = are_merged(decoder) and decoder.config._attn_implementation in OURS
    return FusedDecoder(decoder) if fits else decoder
