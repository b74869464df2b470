"""Blocks: a quantised weight as a file stores it, which C multiplies so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 1024  # of a weight that are compared at once: a few MB of fp32


@dataclass(frozen=True)
class Blocks:
    """Whole numbers with a scale, and perhaps a floor, for each block of inputs: a weight is
    scale * number + floor. numbers: int8 [outs, ins]; scales and floors: both
    float16 or both float32 [outs, blocks]."""

    numbers: Tensor
    scales: Tensor
    floors: Tensor | None = None

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return self.numbers.shape[1] // self.scales.shape[1]

    @property
    def is_small(self) -> bool:
        """Whether every number has 4 bits."""
        return bool(self.numbers.min() >= 0 and self.numbers.max() <= 15)

    def stands_for(self, weight: Tensor) -> bool:
        """Whether a weight [outs, ins] is this one, rounded to bf16."""
        if weight.dtype != torch.bfloat16 or weight.shape != self.numbers.shape:
            return False
        starts = torch.arange(0, len(weight), ROWS)
        return all(self._has(weight, slice(at, at + ROWS)) for at in starts.tolist())

    def _has(self, weight: Tensor, rows: slice) -> bool:
        """The same of some rows."""
        found = (
            self.numbers[rows].unflatten(1, (-1, self.block)) * self.scales[rows, :, None].float()
        )
        if self.floors is not None:
            found += self.floors[rows, :, None].float()
        return torch.equal(found.flatten(1).bfloat16(), weight[rows])

    def rows(self, places: Tensor) -> "Blocks":
        """The rows at `places` int64 [n] alone."""
        floors = None if self.floors is None else self.floors[places]
        return Blocks(self.numbers[places], self.scales[places], floors)

    @classmethod
    def of(cls, weight: Tensor, block: int) -> "Blocks":
        """The nearest blocks of 8 bits to a weight [outs, ins] of whole blocks, scales float32."""
        parts = weight.float().unflatten(1, (-1, block))
        scales = (parts.abs().amax(2) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        numbers = (parts / scales.unsqueeze(2)).round().to(torch.int8)
        return cls(numbers.flatten(1), scales)

    @classmethod
    def joined(cls, parts: Sequence["Blocks"]) -> "Blocks":
        """One weight from the rows of several with as many inputs: the smallest block and the
        widest scale of any."""
        block = min(part.block for part in parts)
        dtype = max((part.scales.dtype for part in parts), key=lambda kind: kind.itemsize)

        def whole(tables: list[Tensor]) -> Tensor:
            spread = [
                table.to(dtype).repeat_interleave(part.block // block, 1)
                for part, table in zip(parts, tables, strict=True)
            ]
            return torch.cat(spread)

        floors = None
        if any(part.floors is not None for part in parts):
            none = [torch.zeros_like(part.scales) for part in parts]
            floors = whole(
                [
                    zero if p.floors is None else p.floors
                    for p, zero in zip(parts, none, strict=True)
                ]
            )
        scales = whole([part.scales for part in parts])
        return cls(torch.cat([part.numbers for part in parts]), scales, floors)


Stored = Callable[[str], Blocks | None]  # the weight of a tensor's name, where it is stored so


def nothing_stored(_: str) -> None:
    """The Stored of a model whose file holds floats."""


def joined(stored: Stored, place: str, *linears: str) -> Blocks | None:
    """The weights of several linears of the module at `place`, side by side; None where one is not
    stored as blocks."""
    found = [stored(f"{place}.{name}.weight") for name in linears]
    parts = [part for part in found if part is not None]
    return Blocks.joined(parts) if len(parts) == len(found) else None
