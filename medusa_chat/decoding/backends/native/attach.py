"""Attach: how a backbone whose decoder C supports gets a NativeStep and what it calls."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.native.blocks import AS_IT_IS, Blocks, Keep
from medusa_chat.decoding.backends.native.decoder import NativeDecoder, NativeStep
from medusa_chat.decoding.backends.native.heads import NativeHeads
from medusa_chat.decoding.backends.native.library import WIDEST_PANEL, NativeThreads
from medusa_chat.decoding.backends.native.linear import NativeLinear
from medusa_chat.decoding.backends.native_support import reaches
from medusa_chat.decoding.backends.parity import agrees, share
from medusa_chat.decoding.backends.replacements import is_plain_layer, parted, parts_of
from medusa_chat.decoding.fused_layers import FusedDecoder
from medusa_chat.decoding.heads import MedusaHeads

DTYPES = (torch.float32, torch.bfloat16)
# of the difference from the reference, as a share of the largest number; whole numbers multiply
# values of 16 bits, so that a last bit of fp32 can become some 1e-4
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2}


def can_run(model: Any, keep: Keep = AS_IT_IS) -> bool:
    """Whether the C library can run this model's decoder, asked before any module is replaced: a
    supported config, on a CPU in fp32 or bf16 or to be kept so, layers that merge, a plain LM
    head."""
    decoder, config = model.get_decoder(), model.config.get_text_config()
    layers = list(getattr(decoder, "layers", ()))
    if not layers or not all(is_plain_layer(layer) for layer in layers):
        return False
    if type(model.get_output_embeddings()) is not nn.Linear:
        return False
    dtypes, devices = {p.dtype for p in model.parameters()}, {p.device for p in model.parameters()}
    is_one = keep.dtype is not None or (len(dtypes) == 1 and dtypes <= set(DTYPES))
    return is_one and devices == {torch.device("cpu")} and reaches(config.to_dict())


def layout(
    model: Any, threads: NativeThreads, keep: Keep = AS_IT_IS
) -> Callable[[str, Any], None] | None:
    """What lays a merged layer of a model for which `can_run` holds out for C, given its name too:
    one by one, so that no weight has to be in memory twice. keep: how its weights are kept. None
    where a product by C differs from torch's."""
    first = model.get_decoder().layers[0].self_attn.o_proj
    dtype = keep.dtype or first.weight.dtype
    weight = first.weight.detach().to(dtype)
    if not _is_right(dtype, lambda: NativeLinear(first, threads, weight).off_by(weight)):
        return None
    return partial(_lay_out, threads, keep)


def native_step(
    backbone: Backbone, heads: MedusaHeads | None, threads: NativeThreads, keep: Keep = AS_IT_IS
) -> NativeStep | None:
    """Replace the decoder of a backbone whose layers are laid out, its LM head and the products of
    its Medusa heads by the C library's -> its steps; None where the results differ from the
    reference's. keep: how the LM head's weight is kept."""
    twin = backbone.decoder
    if not isinstance(twin, FusedDecoder):
        return None
    native = NativeDecoder(twin, list(backbone.cache.layers.layers), threads)
    if not _is_right(backbone.dtype, lambda: _difference(backbone, twin, native)):
        backbone.decoder = twin
        return None
    backbone.decoder, backbone.lm_head.pads_rows = native, False
    head: Any = backbone.lm_head.linear
    is_tied = head.weight is backbone.model.get_input_embeddings().weight
    place, weight = "model.embed_tokens" if is_tied else "lm_head", head.weight.detach()
    table = keep([f"{place}.weight"], weight)
    lm_head = NativeLinear(head, threads, table)
    backbone.lm_head.linear = lm_head
    backbone.model.set_output_embeddings(lm_head)
    if heads is not None and heads.weight.dtype == backbone.dtype:
        heads.twin = NativeHeads(heads, threads, table if isinstance(table, Blocks) else None)
    return NativeStep(backbone, native, threads)


def convert(model: Any, dtype: torch.dtype, is_whole: bool = False) -> None:
    """The parameters of a model to a dtype, but unless it is whole for those of its layers'
    linears, which are kept one by one. Buffers stay: rotary frequencies are in fp32."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if is_whole or type(module) is not nn.Linear or module is head:
            for number in module.parameters(recurse=False):
                number.data = number.data.to(dtype)


def _lay_out(threads: NativeThreads, keep: Keep, place: str, layer: Any) -> None:
    """Put native linears into the merged layer at `place` and the stock layer that it wraps. The
    gated products are padded to whole panels with outputs of 0, and the next product's weights with
    columns of 0."""
    attention, mlp = layer.stock.self_attn, layer.stock.mlp
    inner = layer.down.in_features
    more = -inner % WIDEST_PANEL
    gate_up, down, bias = layer.gate_up, layer.down, layer.gate_up.bias
    if more:
        gate_up = SimpleNamespace(
            weight=F.pad(gate_up.weight.view(2, inner, -1), (0, 0, 0, more)).flatten(0, 1),
            bias=bias if bias is None else F.pad(bias.view(2, inner), (0, more)).flatten(),
        )
        down = SimpleNamespace(weight=F.pad(down.weight, (0, more)), bias=down.bias)
    first, both = parts_of(attention, "qkv_proj"), parts_of(mlp, "gate_up_proj")
    sizes = [getattr(attention, name).out_features for name in first]

    def laid(linear: Any, block: str, *names: str) -> NativeLinear:
        kept = keep([f"{place}.{block}.{name}.weight" for name in names], linear.weight.detach())
        return NativeLinear(linear, threads, kept)

    layer.qkv = parted(attention, first, laid(layer.qkv, "self_attn", *first), sizes)
    layer.out = attention.o_proj = laid(layer.out, "self_attn", "o_proj")
    sizes = [2 * (inner + more) // len(both)] * len(both)
    layer.gate_up = parted(mlp, both, laid(gate_up, "mlp", *both), sizes)
    layer.down = mlp.down_proj = laid(down, "mlp", "down_proj")


def round_linears(model: Any, threads: NativeThreads, keep: Keep) -> int:
    """Replace the linears of a model of any family, but for its LM head, by products with blocks
    in C where `keep` makes some -> how many there are."""
    head, count = model.get_output_embeddings(), 0
    for name, module in list(model.named_modules()):
        linear: Any = module
        if type(module) is Conv1D:  # of gpt2: its weight is [ins, outs]
            linear = SimpleNamespace(weight=module.weight.t(), bias=module.bias)
        if type(module) in (nn.Linear, Conv1D) and module is not head:
            blocks = keep([f"{name}.weight"], linear.weight.detach())
            if isinstance(blocks, Blocks):
                rounded = NativeLinear(linear, threads, blocks)
                rounded.weight = linear.weight.new_empty(0)  # some layers ask a linear its dtype
                model.set_submodule(name, rounded)
                count += 1
    return count


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
    return share(found[1], found[0])
