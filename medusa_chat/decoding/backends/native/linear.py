"""NativeLinear: one linear by the C library's products."""

from collections.abc import Iterator
from ctypes import byref
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backends.native.blocks import Blocks
from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.structs import Product
from medusa_chat.decoding.backends.parity import agrees, share

OTHERWISE = "a weight of whole numbers is unpacked to bf16"  # where C's product is wrong
TOLERANCE, SAMPLE = 0.02, 64  # of the difference from torch's product; outputs that are compared


def kept_bytes(model: nn.Module) -> int:
    """Bytes of the weights of a model that stay as their file has them."""
    linears = {id(one): one for one in model.modules() if isinstance(one, NativeLinear)}
    panels = [one.panels for one in linears.values()]
    return sum(one.nbytes for one in panels if one.dtype == torch.uint8)


class NativeLinear(nn.Module):
    """A linear of fp32 or bf16 on a CPU, its weight in panels: [..., ins] -> [..., outs], summed in
    fp32, in the input's dtype. It keeps no reference to the linear that it replaces."""

    def __init__(
        self, linear: Any, threads: NativeThreads, kept: Blocks | Tensor | None = None
    ) -> None:
        """kept: what is multiplied in place of its weight; None: that."""
        super().__init__()
        self.outs, self.ins = linear.weight.shape
        self._bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self._threads = threads
        self.panels: Tensor
        self.register_buffer("panels", None, persistent=False)
        if isinstance(kept, Blocks):
            packed, some = threads.packed(kept), kept.values(slice(SAMPLE))
            if packed is not None:
                self.weights, self.panels = packed
                if agrees(OTHERWISE, lambda: self.off_by(some), TOLERANCE):
                    return
            kept = None
        self.weights, self.panels = threads.panels(linear.weight if kept is None else kept)

    def off_by(self, weight: Tensor) -> float:
        """The largest difference of the first SAMPLE outputs from torch's product with their weight
        [n, ins] in fp32, without a bias, as a share of the largest."""
        x = torch.randn(2, self.ins, generator=torch.Generator().manual_seed(0)).bfloat16().float()
        expected = x @ weight[:SAMPLE].float().t()
        found = self(x)[:, : expected.shape[1]]
        if self._bias is not None:
            found = found - self._bias[: expected.shape[1]]
        return share(found, expected)

    @property
    def bias_values(self) -> Tensor | None:
        """The bias, float32 [outs]; None without one."""
        return self._bias

    @property
    def bias_at(self) -> int | None:
        """The address of the bias in fp32; None without one."""
        return None if self._bias is None else self._bias.data_ptr()

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., ins] -> [..., outs] in the dtype of `hidden`."""
        y = self.product(hidden.reshape(-1, self.ins).float().contiguous())
        return y.view(*hidden.shape[:-1], self.outs).to(hidden.dtype)

    def weight_parts(self) -> Iterator[Tensor]:
        """The weight that is multiplied, some outputs at a time: float32 [n, ins]."""
        left = self.outs
        for part in self._threads.weights(self.weights, self.panels, self.ins):
            yield part[:left]
            left -= len(part)

    def product(self, x: Tensor) -> Tensor:
        """float32 [m, ins], contiguous -> float32 [m, outs]."""
        y = torch.empty(x.shape[0], self.outs)
        self._threads.c.linear(byref(self.job_of(x, y)), self._threads.count)
        return y

    def job_of(self, x: Tensor, y: Tensor) -> Product:
        """The product of x float32 [>= m, ins] into y float32 [m, outs], both contiguous."""
        bias, sizes = self.bias_at, (y.shape[0], self.ins, self.outs)
        return Product(x.data_ptr(), self.weights, bias, y.data_ptr(), *sizes)
