"""Native layers: the merged layers of a model with the C library's linears in them."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backends.native_experts import NativeExperts
from medusa_chat.decoding.backends.native_library import Linear, NativeLibrary, Weights
from medusa_chat.decoding.backends.native_weights import (
    DISABLED,
    SAMPLE,
    TOLERANCE,
    UNCHANGED,
    NativeLinear,
    StoredRows,
    UnreadRows,
    WeightStorage,
)
from medusa_chat.decoding.backends.parity import agrees
from medusa_chat.decoding.fused_layers import Joined
from medusa_chat.decoding.layer_forms import mixture_of, parts_of

OWN = {"own_gate": "per_layer_input_gate", "own_out": "per_layer_projection"}  # of merged layers


@torch.inference_mode()
def layer_packer(
    model: Any, library: NativeLibrary, storage: WeightStorage = UNCHANGED
) -> Callable[[str, Any], None] | None:
    """A function that packs the weights of a merged layer of a model, given the layer's name and
    the layer: one by one, so that no weight has to be in memory twice. None, with a warning, where
    a product by C differs from PyTorch's."""
    first = model.get_decoder().layers[0].self_attn.o_proj
    if not isinstance(first, NativeLinear):
        weight = first.weight.detach()
        if weight.is_meta:  # of a file that is read only as its layers are packed
            random = torch.Generator().manual_seed(1)
            weight = torch.randn(SAMPLE, weight.shape[1], generator=random).bfloat16()
            first = SimpleNamespace(weight=weight, bias=None)
        weight = weight.to(storage.dtype or weight.dtype)
        trial = NativeLinear(first, library, weight)
        if not agrees(DISABLED, lambda: trial.off_by(weight), TOLERANCE):
            return None
    _pack_own_inputs(model, library, storage)
    return partial(_pack_layer, library, storage)


def _pack_own_inputs(model: Any, library: NativeLibrary, storage: WeightStorage) -> None:
    """Pack the projection of embeddings to the layers' own inputs, where a model has some."""
    decoder = model.get_decoder()
    linear = getattr(decoder, "per_layer_model_projection", None)
    if linear is not None and not isinstance(linear, NativeLinear):
        name = next(name for name, one in model.named_modules() if one is linear)
        stored = storage(f"{name}.weight", linear.weight.detach())
        decoder.per_layer_model_projection = NativeLinear(linear, library, stored)


def _pack_layer(library: NativeLibrary, storage: WeightStorage, place: str, layer: Any) -> None:
    """Put native linears into the merged layer at `place` and the stock layer that it wraps: its
    queries, keys and values, its gate and its up product each keep weights of their own kind. What
    is native already stays."""
    attention, mlp = layer.stock.self_attn, getattr(layer.stock, "mlp", layer)
    if isinstance(attention.o_proj, NativeLinear):
        return

    def joined(parent: Any, block: str, whole: str, sizes: list[int]) -> Joined:
        """The parts of a product of a block, of these sizes where it has them as one (Phi-3)."""
        names, parts = parts_of(parent, whole), list[NativeLinear]()
        for name in names:
            linear = getattr(parent, name)
            own = sizes if len(names) == 1 else [len(linear.weight)]
            stored = storage(f"{place}.{block}.{name}.weight", linear.weight.detach())
            parts += _parted(linear, stored, own, library)
            setattr(parent, name, parts[-1])
        made = Joined(*parts)
        if len(names) == 1:
            setattr(parent, names[0], made)
        return made

    def single(parent: Any, block: str, name: str) -> NativeLinear:
        linear = getattr(parent, name)
        stored = storage(f"{place}.{block}.{name}.weight", linear.weight.detach())
        made = NativeLinear(linear, library, stored)
        setattr(parent, name, made)
        return made

    layer.qkv = joined(attention, "self_attn", "qkv_proj", layer.form.outputs)
    if layer.own_gate is not None:
        for ours, name in OWN.items():
            linear = getattr(layer.stock, name)
            stored = storage(f"{place}.{name}.weight", linear.weight.detach())
            setattr(layer, ours, NativeLinear(linear, library, stored))
            setattr(layer.stock, name, getattr(layer, ours))
    layer.out = single(attention, "self_attn", "o_proj")
    if layer.mixture is not None:
        block = mixture_of(layer.stock)
        name = next(name for name, one in layer.stock.named_modules() if one is block.experts)
        block.experts = NativeExperts(block.experts, f"{place}.{name}", library, storage)
        layer.mixture.experts = block.experts
        return
    inner = mlp.down_proj.weight.shape[1]
    layer.gate_up = joined(mlp, "mlp", "gate_up_proj", [inner, inner])
    layer.down = single(mlp, "mlp", "down_proj")


def _parted(
    linear: Any,
    stored: StoredRows | UnreadRows | Tensor,
    sizes: list[int],
    library: NativeLibrary,
) -> list[NativeLinear]:
    """Native linears of so many outputs each, one behind the other, of a linear whose weight is
    stored so."""
    if len(sizes) == 1:
        return [NativeLinear(linear, library, stored)]
    made, start = [], 0
    stored = stored.whole() if isinstance(stored, UnreadRows) else stored
    for size in sizes:
        places = torch.arange(start, start + size)
        rows = (
            stored.rows(places) if isinstance(stored, StoredRows) else stored[start : start + size]
        )
        bias = None if linear.bias is None else linear.bias[start : start + size]
        part = SimpleNamespace(weight=linear.weight[start : start + size], bias=bias)
        made.append(NativeLinear(part, library, rows))
        start += size
    return made


def outputs_of(parts: Any, sizes: Sequence[int], width: int) -> list[Linear]:
    """For C the linears with so many outputs each: these native ones, or parts of the one that has
    the outputs of all, which begin at whole panels of `width`. Raises ValueError where they do not.
    They point at memory of the native linears."""
    if len(parts) == len(sizes):
        return [Linear(one.weights, one.bias_address) for one in parts]
    (whole,) = parts
    if any(size % width for size in sizes):
        raise ValueError(f"outputs {tuple(sizes)} of one weight are no whole panels of {width}")
    found, panel, at = list[Linear](), whole.panels.nbytes // -(-whole.outs // width), 0
    for size in sizes:
        weights = Weights.from_buffer_copy(whole.weights)
        weights.panels += at // width * panel
        bias = whole.bias_address
        found.append(Linear(weights, None if bias is None else bias + 4 * at))
        at += size
    return found


class PackedEmbedding(nn.Module):
    """An embedding whose rows are those of a native linear's weight, in its place: the table is in
    memory once, as it is multiplied. table: that linear; ids int64 [...] -> [..., d]."""

    def __init__(self, table: NativeLinear, embedding: Any) -> None:
        """embedding: the module that it takes the place of; its scale and its dtype are kept."""
        super().__init__()
        self.dtype = embedding.weight.dtype
        scale = getattr(embedding, "embed_scale", None)
        self.scale = 1.0 if scale is None else float(scale.to(self.dtype))
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> [..., d] in the embedding's dtype."""
        rows: Tensor = self.rows(ids) * self.scale
        return rows.to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> the table's rows as they are, float32 [..., d]."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.table.outs:
            raise IndexError("a token id is out of range")
        rows = self.table.rows(ids.flatten())
        return rows.view(*ids.shape, rows.shape[-1])
