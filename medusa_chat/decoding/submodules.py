"""Submodules of a loaded model that are replaced by faster ones of equal result."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# families' norms that are weight * x / rms(x) and nothing else
PLAIN_NORMS = {
    f"{family}RMSNorm"
    for family in "Llama Mistral Mixtral Qwen2 Qwen3 Phi3 Olmo2 Granite SmolLM3".split()
}


class FusedRMSNorm(nn.Module):
    """RMSNorm as one operator: [..., d] -> [..., d]."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.epsilon = float(norm.variance_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.epsilon)


class PackedLinear(nn.Module):
    """A linear whose weight oneDNN has laid out once instead of at every call (CPU only)."""

    def __init__(self, linear: nn.Linear, rows: int = 16) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.bias = linear.bias
        self.weight = linear.weight  # shared with the embedding where those are tied

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden, self.packed, self.bias, "none", [], ""
        )
        return out


def replace_submodules(model: Any) -> list[str]:
    """Replace what can be replaced, in place; returns a sentence for each kind replaced."""
    notes = []
    norms = [name for name, m in model.named_modules() if type(m).__name__ in PLAIN_NORMS]
    for name in norms:
        _put(model, name, FusedRMSNorm(model.get_submodule(name)))
    if norms:
        notes.append(f"{len(norms)} norms fused")
    linears = [name for name, m in model.named_modules() if _is_packable(m)]
    for name in linears:
        _put(model, name, PackedLinear(model.get_submodule(name)))
    if linears:
        notes.append(f"{len(linears)} linears packed for this CPU")
    return notes


def _is_packable(module: nn.Module) -> bool:
    """bf16 on a CPU with AMX: everywhere. fp32: where the output is wide (an LM head)."""
    if type(module) is not nn.Linear or module.weight.device.type != "cpu":
        return False
    if module.weight.dtype == torch.bfloat16:
        return bool(torch.cpu._is_amx_tile_supported())
    wide = module.out_features >= 2048
    return module.weight.dtype == torch.float32 and wide and torch.backends.mkldnn.is_available()


def _put(model: Any, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
