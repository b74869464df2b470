"""NativeLinear: one linear by the C library's products."""

from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.native.library import Team


class NativeLinear(nn.Module):
    """A linear of fp32 on a CPU, its weight laid out in panels: [..., ins] -> [..., outs]."""

    def __init__(self, linear: Any, team: Team) -> None:
        super().__init__()
        self.bias, self.weight = linear.bias, linear.weight
        self.panels: Tensor
        self.register_buffer("panels", team.panels(linear.weight), persistent=False)
        self._team = team

    def forward(self, hidden: Tensor) -> Tensor:
        outs, ins = self.weight.shape
        x = hidden.reshape(-1, ins).contiguous()
        y = torch.empty(len(x), outs)
        bias = None if self.bias is None else self.bias.data_ptr()
        threads = self._team.threads
        self._team.linear(
            x.data_ptr(), self.panels.data_ptr(), bias, y.data_ptr(), len(x), ins, outs, threads
        )
        return y.view(*hidden.shape[:-1], outs)
