"""Blocks: a quantised weight, as a file stores it or made of 16 bits, which C multiplies so."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 256  # of a weight that are looked at together: a few MB of fp32
INPUTS = 32  # with one scale, of blocks that are made here
TINY = 1e-30  # in place of a scale of 0
TABLES = {"lm_head.weight", "model.embed_tokens.weight"}  # of which an LM head is made


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

    def values(self, rows: slice) -> Tensor:
        """The weights of some rows, float32 [n, ins]."""
        numbers = self.numbers[rows].unflatten(1, (-1, self.block))
        found: Tensor = numbers * self.scales[rows, :, None].float()
        if self.floors is not None:
            found += self.floors[rows, :, None].float()
        return found.flatten(1)

    def stands_for(self, weight: Tensor) -> bool:
        """Whether a weight [outs, ins] is this one, rounded to bf16."""
        if weight.dtype != torch.bfloat16 or weight.shape != self.numbers.shape:
            return False
        parts = (slice(at, at + ROWS) for at in range(0, len(weight), ROWS))
        return all(torch.equal(self.values(rows).bfloat16(), weight[rows]) for rows in parts)

    def rows(self, places: Tensor) -> "Blocks":
        """The rows at `places` int64 [n] alone."""
        floors = None if self.floors is None else self.floors[places]
        return Blocks(self.numbers[places], self.scales[places], floors)

    @classmethod
    def of(cls, weight: Tensor, bits: int = 8) -> "Blocks":
        """Blocks of INPUTS near a weight [outs, ins], ins a multiple of INPUTS: of 8 bits, or of 4
        with floors."""
        round_part = _nearest_bytes if bits == 8 else _nearest_nibbles
        parts = [round_part(part.float().unflatten(1, (-1, INPUTS))) for part in weight.split(ROWS)]
        numbers, *tables = (torch.cat(found) for found in zip(*parts, strict=True))
        return cls(numbers.flatten(1), *tables)

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

        floors = [torch.zeros_like(p.scales) if p.floors is None else p.floors for p in parts]
        is_floored = any(part.floors is not None for part in parts)
        scales = whole([part.scales for part in parts])
        numbers = torch.cat([part.numbers for part in parts])
        return cls(numbers, scales, whole(floors) if is_floored else None)


def _nearest_bytes(x: Tensor) -> tuple[Tensor, ...]:
    """x float32 [n, blocks, INPUTS] -> whole numbers int8 and scales float16 [n, blocks]."""
    scales = (x.abs().amax(2) / 127).half()
    steps = scales.float().clamp(min=TINY).unsqueeze(2)
    return (x / steps).round().clamp(-127, 127).to(torch.int8), scales


def _nearest_nibbles(x: Tensor) -> tuple[Tensor, ...]:
    """x float32 [n, blocks, INPUTS] -> whole numbers from 0 to 15 int8, scales and floors float16
    [n, blocks]: those of the line by least squares through x and its places in its range, which is
    a fifth nearer to normal weights than nf4's 16 values."""
    least = x.amin(2, True)
    step = ((x.amax(2, True) - least) / 15).clamp_(min=TINY)
    numbers = ((x - least) / step).round_()
    mean, middle = x.mean(2, True), numbers.mean(2, True)
    away = numbers - middle
    spread = away.square().sum(2, True).clamp_(min=TINY)
    scales = ((away * x).sum(2, True) / spread).half()
    floors = (mean - scales.float() * middle).half()
    numbers = ((x - floors.float()) / scales.float().clamp_(min=TINY)).round_().clamp_(0, 15)
    return numbers.to(torch.int8), scales.squeeze(2), floors.squeeze(2)


class Keep:
    """How the weights of a model lie in memory where C multiplies them: as they were read, or in a
    dtype, in which all else of the model is then, too."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def __call__(self, names: Sequence[str], weight: Tensor) -> Blocks | Tensor:
        """What is multiplied in place of a weight [outs, ins], that of the tensors of these names
        side by side: blocks, or numbers of fp32 or bf16."""
        return weight if self.dtype is None else weight.to(self.dtype)


class Rounded(Keep):
    """The Keep that makes blocks of a model's weights: of 8 bits, or of 4 but for the LM head."""

    def __init__(self, bits: int) -> None:
        super().__init__(torch.bfloat16)
        self.bits = bits

    def __call__(self, names: Sequence[str], weight: Tensor) -> Blocks | Tensor:
        """The blocks nearest to a weight; in bf16 where its inputs are not whole blocks."""
        if weight.shape[1] % INPUTS:
            return weight.bfloat16()
        return Blocks.of(weight, 8 if set(names) & TABLES else self.bits)


AS_IT_IS = Keep()
