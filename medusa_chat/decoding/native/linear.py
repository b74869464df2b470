"""NativeLinear: one linear by the C library's products."""

from ctypes import byref
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.native.jobs import Product
from medusa_chat.decoding.native.library import Team


class NativeLinear(nn.Module):
    """A linear of fp32 or bf16 on a CPU, its weight laid out in panels: [..., ins] -> [..., outs],
    which is in fp32."""

    def __init__(self, linear: Any, team: Team) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._bias = None if linear.bias is None else linear.bias.detach().float()
        self.panels: Tensor
        self.register_buffer("panels", team.panels(linear.weight), persistent=False)
        self._team = team

    def forward(self, hidden: Tensor) -> Tensor:
        outs, ins = self.weight.shape
        x = hidden.reshape(-1, ins).float().contiguous()
        y = torch.empty(len(x), outs)
        job = Product(x.data_ptr(), self.panels.data_ptr(), self.bias_at, y.data_ptr(), len(x))
        job.ins, job.outs, job.is_half = ins, outs, self.panels.dtype == torch.bfloat16
        self._team.linear(byref(job), self._team.threads)
        return y.view(*hidden.shape[:-1], outs)

    @property
    def bias_at(self) -> int | None:
        """Where the bias is, in fp32."""
        return None if self._bias is None else self._bias.data_ptr()
