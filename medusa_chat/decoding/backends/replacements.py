"""Replacements: faster submodules of a loaded model, with equal results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backends.native_experts import NativeExperts
from medusa_chat.decoding.backends.native_weights import NativeLinear
from medusa_chat.decoding.backends.quantised import (
    Int8Linear,
    can_merge,
    is_linear4,
    merge4,
    merge8,
    take_int8,
    with_own_memory,
)
from medusa_chat.decoding.backends.stored_linear import StoredLinear
from medusa_chat.decoding.fused_layers import FusedLayer, Joined
from medusa_chat.decoding.layer_forms import (
    are_experts,
    is_described,
    is_for_c,
    mixture_of,
    parts_of,
)

WIDE = 1024  # outputs from which oneDNN's layout pays in fp32
# families whose norms are weight * x / rms(x) and nothing else
PLAIN_NORMS = {
    f"{family}RMSNorm"
    for family in (
        "Llama Mistral Mixtral Qwen2 Qwen3 Qwen3Moe Phi3 Olmo2 Granite GraniteMoe "
        "SmolLM3 Ministral3"
    ).split()
}


class PackedLinear(nn.Module):
    """A linear whose weight is in oneDNN's layout, converted once instead of at every call
    (CPU)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 16)  # rows
        self.bias = linear.bias
        self.weight = linear.weight  # shared with the embedding where those are tied

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., N], in the dtype of the weight."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden, self.packed, self.bias, "none", [], ""
        )
        return out


class Outputs(nn.Module):
    """Some outputs of a merged linear, for a stock layer that calls its projections one by one:
    [..., K] -> [..., stop - start]. It holds no weights of its own."""

    def __init__(self, whole: nn.Module, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., stop - start], in the dtype of `hidden`."""
        out: Tensor = self.whole(hidden)
        return out[..., self.start : self.stop]


def replace_submodules(
    model: Any, packs: bool = True, pack_layer: Callable[[str, FusedLayer], None] | None = None
) -> list[str]:
    """Replace norms, layers and the LM head in place where a faster module gives the same; returns
    a sentence for each kind. packs: whether linears may be converted to oneDNN's layout.
    pack_layer: called with the name of each layer and the merged one, before the next is merged."""
    take_int8(model)
    norms = [name for name, m in model.named_modules() if type(m).__name__ in PLAIN_NORMS]
    for name in norms:
        model.set_submodule(name, to_torch_rmsnorm(model.get_submodule(name)))
    layers = [name for name, m in model.named_modules() if is_plain_layer(m)]
    if pack_layer is None:
        layers = [one for one in layers if not is_for_c(model.get_submodule(one))]
    for name in layers:
        stock: Any = model.get_submodule(name)
        layer = fuse(stock, packs) if pack_layer is None else wrap(stock)
        model.set_submodule(name, layer)
        if pack_layer is not None:
            pack_layer(name, layer)
        torch.cuda.empty_cache()  # no merged linear fits where its parts were
    head = model.get_output_embeddings()
    if packs and (wide := packed(head)) is not head:
        model.set_output_embeddings(wide)
    counts = {"norms fused": len(norms), "layers merged": len(layers)}
    notes = [f"{count} {what}" for what, count in counts.items() if count]
    linears = sum(isinstance(m, PackedLinear) for m in model.modules())
    return [*notes, f"{linears} linears packed for this CPU"] if linears else notes


def to_torch_rmsnorm(norm: Any) -> nn.RMSNorm:
    """A family's RMSNorm as torch's, which is one operator."""
    fused = nn.RMSNorm(norm.weight.numel(), float(norm.variance_epsilon), device="meta")
    fused.weight = norm.weight
    return fused


def fuse(layer: Any, packs: bool) -> FusedLayer:
    """The layer with its projections merged. packs: whether weights may be converted to oneDNN's
    layout."""
    attention, mlp = layer.self_attn, layer.mlp
    if isinstance(attention.o_proj, NativeLinear):
        return wrap(layer)
    lay = packed if packs else lambda linear: linear
    return FusedLayer(
        layer,
        qkv=lay(merge(attention, *parts_of(attention, "qkv_proj"))),
        out=lay(with_own_memory(attention.o_proj)),
        gate_up=lay(merge(mlp, *parts_of(mlp, "gate_up_proj"))),
        down=lay(with_own_memory(mlp.down_proj)),
    )


def wrap(layer: Any) -> FusedLayer:
    """The layer with its projections as they are, called as one where they have one input."""
    attention, is_mixed = layer.self_attn, mixture_of(layer) is not None
    return FusedLayer(
        layer,
        qkv=_joined(attention, "qkv_proj"),
        out=attention.o_proj,
        gate_up=None if is_mixed else _joined(layer.mlp, "gate_up_proj"),
        down=None if is_mixed else layer.mlp.down_proj,
    )


def _joined(parent: Any, whole: str) -> Joined:
    return Joined(*(getattr(parent, name) for name in parts_of(parent, whole)))


def is_plain_layer(module: nn.Module) -> bool:
    """Whether FusedLayer gives what this layer gives: its form is described, its linears are plain,
    the C library's, or in 4 bits that merge without loss; its experts, where it has some, are ones
    that C can have."""
    if not is_described(module):
        return False
    layer: Any = module
    mixture, attention = mixture_of(layer), layer.self_attn
    joined, single = [(attention, "qkv_proj")], [attention.o_proj]
    if mixture is None:
        joined.append((layer.mlp, "gate_up_proj"))
        single.append(layer.mlp.down_proj)
    elif not (are_experts(mixture.experts) or isinstance(mixture.experts, NativeExperts)):
        return False
    merged = [
        tuple(getattr(parent, name) for name in parts_of(parent, whole)) for parent, whole in joined
    ]
    return all(map(_fits, [*merged, *((one,) for one in single)]))


def _fits(linears: tuple[Any, ...]) -> bool:
    """Whether these linears are one, or several that merge."""
    if all(is_linear4(linear) for linear in linears):
        return len(linears) == 1 or can_merge(*linears)
    kinds = {nn.Linear}, {Int8Linear}, {NativeLinear}, {StoredLinear}
    return {type(linear) for linear in linears} in kinds


def merge(parent: Any, *names: str) -> Any:
    """One linear with the outputs of one or several linears of `parent` side by side. No weight is
    held twice: the linears' weights become views of it; in 4 and 8 bits the linears become
    `Outputs` of it."""
    linears = [getattr(parent, name) for name in names]
    first = linears[0]
    if len(linears) == 1:
        return with_own_memory(first)
    if isinstance(first, StoredLinear):
        return parted(parent, names, StoredLinear.joined(linears), [x.outs for x in linears])
    if isinstance(first, Int8Linear):
        return parted(parent, names, merge8(*linears), [one.shape[0] for one in linears])
    sizes = [linear.out_features for linear in linears]
    if is_linear4(first):
        whole = parted(parent, names, merge4(*linears), sizes)
        for linear in linears:
            linear.weight = None  # in a reference cycle: freed now, not at the next collection
        return whole
    whole = nn.Linear(first.in_features, sum(sizes), bias=False, device="meta")
    whole.weight = nn.Parameter(torch.cat([x.weight.data for x in linears]), requires_grad=False)
    if first.bias is not None:
        whole.bias = nn.Parameter(torch.cat([x.bias.data for x in linears]), requires_grad=False)
    for linear, weight in zip(linears, whole.weight.data.split(sizes), strict=True):
        linear.weight.data = weight
    return whole


def parted(parent: Any, names: Sequence[str], whole: Any, sizes: Sequence[int]) -> Any:
    """The merged linear; those of `parent` become Outputs of it."""
    start = 0
    for name, size in zip(names, sizes, strict=True):
        setattr(parent, name, Outputs(whole, start, start + size))
        start += size
    return whole


def packed(linear: nn.Linear) -> nn.Module:
    """The linear in oneDNN's own layout where that pays: in bf16 on a CPU with AMX, in fp32 on a
    CPU where the output is wide; else itself."""
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu":
        return linear
    if linear.weight.dtype == torch.bfloat16:
        pays = bool(torch.cpu._is_amx_tile_supported())
    else:
        pays = linear.weight.dtype == torch.float32 and linear.out_features >= WIDE
    return PackedLinear(linear) if pays and torch.backends.mkldnn.is_available() else linear
