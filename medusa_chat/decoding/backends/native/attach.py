"""Attach: how a backbone whose decoder C supports gets a NativeStep and what it calls."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.native.blocks import Blocks, Stored, joined, nothing_stored
from medusa_chat.decoding.backends.native.decoder import NativeDecoder, NativeStep
from medusa_chat.decoding.backends.native.heads import NativeHeads
from medusa_chat.decoding.backends.native.library import WIDEST_PANEL, NativeThreads
from medusa_chat.decoding.backends.native.linear import NativeLinear
from medusa_chat.decoding.backends.native_support import reaches
from medusa_chat.decoding.backends.parity import agrees
from medusa_chat.decoding.backends.replacements import Outputs, is_plain_layer
from medusa_chat.decoding.fused_layers import FusedDecoder
from medusa_chat.decoding.heads import MedusaHeads

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {
    torch.float32: 1e-4,
    torch.bfloat16: 0.2,
}  # of the difference from the reference, as a share of the largest number


def can_run(model: Any) -> bool:
    """Whether the C library can run this model's decoder, asked before any module is replaced: a
    supported config, fp32 or bf16 on a CPU, layers that merge, a plain LM head."""
    decoder, config = model.get_decoder(), model.config.get_text_config()
    layers = list(getattr(decoder, "layers", ()))
    if not layers or not all(is_plain_layer(layer) for layer in layers):
        return False
    if type(model.get_output_embeddings()) is not nn.Linear:
        return False
    weights = [p for p in model.parameters()]
    return (
        len({p.dtype for p in weights} & set(DTYPES)) == 1
        and all(p.dtype == weights[0].dtype and p.device.type == "cpu" for p in weights)
        and reaches(config.to_dict())
    )


def native_step(
    backbone: Backbone,
    heads: MedusaHeads | None,
    threads: NativeThreads,
    stored: Stored = nothing_stored,
) -> NativeStep | None:
    """Replace the decoder of a backbone for which `can_run` holds, its LM head and the products of
    its Medusa heads by the C library's -> its steps; None where the results differ from the
    reference's. Converted weights are not kept in their old layout. stored: the weights of the
    tensor of a name as its file has them; where they stand for the backbone's very numbers they
    stay so in memory too, and are multiplied so."""
    twin = backbone.decoder
    if not isinstance(twin, FusedDecoder):
        return None
    if not _is_right(backbone.dtype, lambda: _off_by(twin.stock.layers[0].qkv, threads)):
        return None
    names = {id(module): name for name, module in backbone.model.named_modules()}
    for layer in twin.stock.layers:
        _lay_out(layer, threads, partial(joined, stored, names[id(layer)]))
    native = NativeDecoder(twin, list(backbone.cache.layers.layers), threads)
    if not _is_right(backbone.dtype, lambda: _difference(backbone, twin, native)):
        backbone.decoder = twin
        return None
    backbone.decoder = native
    is_tied = backbone.lm_head.linear.weight is backbone.model.get_input_embeddings().weight
    place = "model.embed_tokens" if is_tied else "lm_head"
    table = stored(f"{place}.weight")
    lm_head = NativeLinear(backbone.lm_head.linear, threads, table)
    backbone.lm_head.linear = lm_head
    backbone.model.set_output_embeddings(lm_head)
    if heads is not None and heads.weight.dtype == backbone.dtype:
        heads.twin = NativeHeads(heads, threads, table)
    return NativeStep(backbone, native, threads)


def _lay_out(layer: Any, threads: NativeThreads, stored: Callable[..., Blocks | None]) -> None:
    """Put native linears into a merged layer and the stock layer that it wraps. The gated products
    are padded to whole panels with outputs of 0, and the next product's weights with columns of
    0. stored: the weight of these linears side by side, as it is stored."""
    attention, mlp = layer.stock.self_attn, layer.stock.mlp
    inner = layer.down.in_features
    more = -inner % WIDEST_PANEL
    gate_up = SimpleNamespace(
        weight=F.pad(layer.gate_up.weight.view(2, inner, -1), (0, 0, 0, more)).flatten(0, 1),
        bias=layer.gate_up.bias,
    )
    if gate_up.bias is not None:
        gate_up.bias = F.pad(gate_up.bias.view(2, inner), (0, more)).flatten()
    down = SimpleNamespace(weight=F.pad(layer.down.weight, (0, more)), bias=layer.down.bias)
    sizes = [getattr(attention, name).out_features for name in ("q_proj", "k_proj", "v_proj")]
    attend, gate = (f"self_attn.{name}_proj" for name in "qkv"), ("mlp.gate_proj", "mlp.up_proj")
    layer.qkv = NativeLinear(layer.qkv, threads, stored(*attend))
    layer.out = NativeLinear(layer.out, threads, stored("self_attn.o_proj"))
    layer.gate_up = NativeLinear(gate_up, threads, None if more else stored(*gate))
    layer.down = NativeLinear(down, threads, None if more else stored("mlp.down_proj"))
    attention.o_proj, mlp.down_proj = layer.out, layer.down
    q, k, v = accumulate(sizes)
    attention.q_proj = Outputs(layer.qkv, 0, q)
    attention.k_proj, attention.v_proj = Outputs(layer.qkv, q, k), Outputs(layer.qkv, k, v)
    mlp.gate_proj = Outputs(layer.gate_up, 0, inner + more)
    mlp.up_proj = Outputs(layer.gate_up, inner + more, 2 * (inner + more))


def _is_right(dtype: torch.dtype, difference: Callable[[], float]) -> bool:
    """Whether our results agree with torch's; a line in the log where they do not."""
    with torch.inference_mode():
        return agrees("the decoder runs by torch's operators", difference, TOLERANCES[dtype])


def _difference(backbone: Backbone, *decoders: Any) -> float:
    """The largest difference between the states of two decoders, as a share of the largest state.
    Leaves the backbone with the second one and an empty cache."""
    found = []
    for decoder in decoders:
        backbone.decoder = decoder
        backbone.cache.crop(0)
        ids = torch.arange(23) * 7 % backbone.vocabulary
        parts = [backbone.run_chunk(part) for part in ids.split([13, 1, 1, 8])]
        found.append(torch.cat(parts))
    backbone.cache.crop(0)
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


def _off_by(linear: Any, threads: NativeThreads) -> float:
    """The largest difference of our product from torch's, as a share of the largest output."""
    x = torch.randn(7, linear.in_features, generator=torch.Generator().manual_seed(0))
    found = NativeLinear(linear, threads)(x)
    expected = linear(x.to(linear.weight.dtype)).float()
    return float((found - expected).abs().max() / expected.abs().max())
