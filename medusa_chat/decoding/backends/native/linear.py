"""NativeLinear: one linear by the C library's products."""

from ctypes import byref
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.structs import Product, Weights

FLOATS, HALVES = 0, 1  # kernels/weights.h


class NativeLinear(nn.Module):
    """A linear of fp32 or bf16 on a CPU, its weight in panels: [..., ins] -> [..., outs], summed in
    fp32, in the input's dtype. It keeps no reference to the linear that it replaces."""

    def __init__(self, linear: Any, team: NativeThreads) -> None:
        super().__init__()
        self.outs, self.ins = linear.weight.shape
        self._bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self.panels: Tensor
        self.register_buffer("panels", team.panels(linear.weight), persistent=False)
        self._team = team

    @property
    def weights(self) -> Weights:
        """Where its panels are, and what they are made of."""
        kind = HALVES if self.panels.dtype == torch.bfloat16 else FLOATS
        return Weights(self.panels.data_ptr(), kind)

    @property
    def bias_at(self) -> int | None:
        """The address of the bias in fp32; None without one."""
        return None if self._bias is None else self._bias.data_ptr()

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., ins] -> [..., outs] in the dtype of `hidden`."""
        x = hidden.reshape(-1, self.ins).float().contiguous()
        y = torch.empty(len(x), self.outs)
        job = Product(x.data_ptr(), self.weights, self.bias_at, y.data_ptr(), len(x))
        job.ins, job.outs = self.ins, self.outs
        self._team.linear(byref(job), self._team.threads)
        return y.view(*hidden.shape[:-1], self.outs).to(hidden.dtype)
