"""Replacements for submodules of a loaded model: faster, with equal results."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.attention import OURS, fold
from medusa_chat.decoding.layer_ops import TORCH
from medusa_chat.decoding.linear4 import can_merge, is_linear4, moved
from medusa_chat.decoding.merged_linear import PackedLinear, merge, packed

# families whose norms are weight * x / rms(x) and nothing else
PLAIN_NORMS = {
    f"{family}RMSNorm"
    for family in "Llama Mistral Mixtral Qwen2 Qwen3 Phi3 Olmo2 Granite SmolLM3".split()
}
# families whose layers are norm, rotary attention, norm, gated SiLU, and nothing else
PLAIN_LAYERS = {f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2")}


class FusedRMSNorm(nn.Module):
    """RMSNorm in few operators: [..., d] -> [..., d].

    On a CPU in fp32, x * (w sqrt(d)) / hypot(|x|, sqrt(d epsilon)): the same formula in three
    operators, in half the time of the composite one; elsewhere the device's own kernel.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.epsilon = float(norm.variance_epsilon)
        size = self.weight.numel()
        self.is_split = self.weight.dtype == torch.float32 and self.weight.device.type == "cpu"
        self.scaled: Tensor
        self.floor: Tensor
        self.register_buffer("scaled", self.weight.detach() * size**0.5, persistent=False)
        floor = torch.tensor((size * self.epsilon) ** 0.5, device=self.weight.device)
        self.register_buffer("floor", floor, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., d], in the dtype of `hidden`."""
        if not self.is_split:
            return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.epsilon)
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        normed: Tensor = (hidden / torch.hypot(length, self.floor)).mul_(self.scaled)
        return normed


class FusedLayer(nn.Module):
    """A decoder layer with its q, k, v and its gate and up projections merged.

    It works with the attention functions registered in attention.py. With any other it calls the
    stock layer, whose weights are views of the merged ones (in 4 bits its projections are `Rows`).
    hidden [1, q, d] -> [1, q, d].
    """

    def __init__(self, layer: Any, packs: bool = True) -> None:
        """packs: whether weights may be converted to oneDNN's layout."""
        super().__init__()
        self.stock = layer
        attention, mlp = layer.self_attn, layer.mlp
        self.config, self.index = attention.config, attention.layer_idx
        self.scaling, self.head_dim = attention.scaling, attention.head_dim
        queries, keys = attention.q_proj.out_features, attention.k_proj.out_features
        self.heads = queries // self.head_dim, keys // self.head_dim
        self.ops = TORCH
        self.before, self.after = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        lay = packed if packs else lambda linear: linear
        self.qkv = lay(merge(attention, "q_proj", "k_proj", "v_proj"))
        self.out = lay(moved(attention.o_proj))
        self.gate_up = lay(merge(mlp, "gate_proj", "up_proj"))
        self.down = lay(moved(mlp.down_proj))
        half = self.head_dim // 2
        sign = torch.tensor([-1.0] * half + [1.0] * half).to(self.before.weight)
        self.sign: Tensor  # of rotate_half
        self.register_buffer("sign", sign, persistent=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states [1, q, d], attention_mask as the attention function takes it,
        position_embeddings (cos, sin) [1, q, D] -> [1, q, d], all in the layer's dtype."""
        if self.config._attn_implementation not in OURS or position_embeddings is None:
            out: Tensor = self.stock(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            return out
        cos, sin = position_embeddings
        angles = cos, sin * self.sign
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
        [1, q, D] -> the same two after this layer, all in its dtype."""
        if delta is None:
            x = self.before(hidden)
        else:
            hidden, x = self.ops.add_norm(hidden, delta, self.before)
        hidden, x = self.ops.add_norm(hidden, self._attend(x, mask, cache, angles), self.after)
        return hidden, self.down(self.ops.gated(self.gate_up(x)))

    def _attend(
        self, x: Tensor, mask: Tensor | None, cache: Any, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The attention block: x [1, q, d] -> [1, q, d]."""
        read = self.ops.turned(self.qkv(x), *angles, self.heads, cache, self.index)
        mixed = OURS[self.config._attn_implementation](*read, mask, self.scaling)
        out: Tensor = self.out(mixed.flatten(2))
        return out


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
        angles = cos, sin * stock.layers[0].sign
        for layer in stock.layers:
            hidden, delta = layer.run(hidden, delta, attention_mask, past_key_values, angles)
        _, normed = layer.ops.add_norm(hidden, delta, stock.norm)
        return SimpleNamespace(last_hidden_state=normed)


def lean_decoder(decoder: Any, implementation: str) -> Any:
    """The decoder without its wrappers where every layer is merged and shares one mask."""
    kinds = set(getattr(decoder.config, "layer_types", None) or ["full_attention"])
    layers = getattr(decoder, "layers", [])
    is_merged = len(layers) > 0 and all(isinstance(layer, FusedLayer) for layer in layers)
    fits = is_merged and implementation in OURS and len(kinds) == 1
    return FusedDecoder(decoder) if fits else decoder


def replace_submodules(model: Any, packs: bool = True) -> list[str]:
    """Replace norms, layers and the LM head in place where a faster module gives the same; returns
    a sentence for each kind. packs: whether linears may be converted to oneDNN's layout."""
    norms = [name for name, m in model.named_modules() if type(m).__name__ in PLAIN_NORMS]
    for name in norms:
        model.set_submodule(name, FusedRMSNorm(model.get_submodule(name)))
    layers = [name for name, m in model.named_modules() if is_plain_layer(m)]
    for name in layers:
        model.set_submodule(name, FusedLayer(model.get_submodule(name), packs))
        torch.cuda.empty_cache()  # no merged linear fits where its parts were
    head = model.get_output_embeddings()
    if packs and (wide := packed(head)) is not head:
        model.set_output_embeddings(wide)
    counts = {"norms fused": len(norms), "layers merged": len(layers)}
    notes = [f"{count} {what}" for what, count in counts.items() if count]
    linears = sum(isinstance(m, PackedLinear) for m in model.modules())
    return [*notes, f"{linears} linears packed for this CPU"] if linears else notes


def is_plain_layer(module: nn.Module) -> bool:
    """Whether FusedLayer gives what this layer gives: a known family, SiLU, its linears plain or
    in 4 bits that merge without loss."""
    if type(module).__name__ not in PLAIN_LAYERS:
        return False
    layer: Any = module
    attention, mlp = layer.self_attn, layer.mlp
    merged = [(attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)]
    alone = (attention.o_proj, mlp.down_proj)
    is_silu = layer.self_attn.config.hidden_act == "silu"
    return (
        is_silu
        and all(_fits(group) for group in merged)
        and all(type(linear) is nn.Linear or is_linear4(linear) for linear in alone)
    )


def _fits(linears: tuple[Any, ...]) -> bool:
    if all(is_linear4(linear) for linear in linears):
        return can_merge(*linears)
    return all(type(linear) is nn.Linear for linear in linears)
