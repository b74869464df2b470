"""Linears of a loaded model merged side by side, and laid out as oneDNN multiplies fastest."""

from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.linear4 import Rows, is_linear4, merge4

WIDE = 1024  # outputs from which oneDNN's layout pays in fp32


class PackedLinear(nn.Module):
    """A linear whose weight is in oneDNN's layout, converted once instead of at every call
    (CPU)."""

    def __init__(self, linear: nn.Linear, rows: int = 16) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.bias = linear.bias
        self.weight = linear.weight  # shared with the embedding where those are tied

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., N], in the dtype of the weight."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden, self.packed, self.bias, "none", [], ""
        )
        return out


def merge(parent: Any, *names: str) -> Any:
    """One linear with the outputs of several linears of `parent` side by side. No weight is held
    twice: the linears' weights become views of it; in 4 bits the linears become `Rows` of it."""
    linears = [getattr(parent, name) for name in names]
    sizes = [linear.out_features for linear in linears]
    if is_linear4(linears[0]):
        whole, start = merge4(*linears), 0
        for name, size in zip(names, sizes, strict=True):
            setattr(parent, name, Rows(whole, start, start + size))
            start += size
        for linear in linears:
            linear.weight = (
                None  # a reference cycle: free the weight now, not at the next collection
            )
        return whole
    first = linears[0]
    whole = nn.Linear(first.in_features, sum(sizes), bias=False, device="meta")
    whole.weight = nn.Parameter(torch.cat([x.weight.data for x in linears]), requires_grad=False)
    if first.bias is not None:
        whole.bias = nn.Parameter(torch.cat([x.bias.data for x in linears]), requires_grad=False)
    for linear, weight in zip(linears, whole.weight.data.split(sizes), strict=True):
        linear.weight.data = weight
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
