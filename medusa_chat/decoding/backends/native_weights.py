"""Native weights: what the C library multiplies, packed once at a load, and NativeLinear.

A weight is fp32, bf16, or whole numbers of 4 or 8 bits in blocks with one scale. Packed, the
weights of P outputs lie side by side: a panel (kernels/weights.h).
"""

from collections.abc import Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from medusa_chat.decoding.backends.native_library import NativeLibrary, Product, Weights
from medusa_chat.decoding.backends.parity import agrees, share

WIDEST_PANEL = 32  # outputs, on any CPU
FLOATS, HALVES, UPPERS, NIBBLES, BYTES = range(5)  # kernels/weights.h
BLOCK_SIZES = 16, 32, 64  # inputs with one scale that kernels/packed.c takes
CHUNK_ROWS = 4096  # rows of a weight that are examined at a time
UNPACKED = 2**20  # weights that are unpacked at a time, a few MB of fp32

ROWS = 256  # of a weight that are rounded at a time: a few MB of fp32
INPUTS = 32  # with one scale, of blocks that are made here
TINY = 1e-30  # in place of a scale of 0
TABLES = {"lm_head.weight", "model.embed_tokens.weight"}  # of which an LM head is made

DISABLED = "native backend disabled"
WRONG_PRODUCT = "a quantised weight is unpacked to bf16"  # where C's product is wrong
TOLERANCE, SAMPLE = 0.02, 64  # of the difference from torch's product; outputs that are compared


@dataclass(frozen=True)
class Blocks:
    """A quantised weight: whole numbers with a scale, and perhaps a floor, for each block of
    inputs: a weight is scale * number + floor. numbers: int8 [outs, ins]; scales and floors: both
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
        values: Tensor = numbers * self.scales[rows, :, None].float()
        if self.floors is not None:
            values += self.floors[rows, :, None].float()
        return values.flatten(1)

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
        numbers, *tables = (torch.cat(column) for column in zip(*parts, strict=True))
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


class WeightStorage:
    """How the weights of a model are stored in memory where the C library multiplies them:
    unchanged, or in a dtype, to which the rest of the model is then converted too."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def __call__(self, names: Sequence[str], weight: Tensor) -> Blocks | Tensor:
        """What is multiplied in place of a weight [outs, ins], that of the tensors of these names
        side by side: blocks, or numbers of fp32 or bf16."""
        return weight if self.dtype is None else weight.to(self.dtype)


class Quantised(WeightStorage):
    """Blocks made of the model's weights: of 8 bits, or of 4 but for the LM head."""

    def __init__(self, bits: int) -> None:
        super().__init__(torch.bfloat16)
        self.bits = bits

    def __call__(self, names: Sequence[str], weight: Tensor) -> Blocks | Tensor:
        """The blocks nearest to a weight; in bf16 where its inputs are not whole blocks."""
        if weight.shape[1] % INPUTS:
            return weight.bfloat16()
        return Blocks.of(weight, 8 if set(names) & TABLES else self.bits)


UNCHANGED = WeightStorage()


# ----------------------------------------------------------------------------------------- panels


def pack_floats(weight: Tensor, width: int) -> tuple[Weights, Tensor]:
    """Pack matrices [outs, ins] or [n, outs, ins] of fp32 or bf16 into panels of `width` outputs P,
    one behind the other -> their description for C, and the panels in words of 4 bytes, int32: of
    fp32 [n ceil(outs / P), ins, P], of two of bf16, which fp32 weights are stored in where that
    changes none of them, [n ceil(outs / P), ceil(ins / 2), P]; 0 beyond the last output and
    input."""
    kind = _float_kind(weight)
    rows = weight.detach().to(torch.float32 if kind == FLOATS else torch.bfloat16)
    spare = -rows.shape[-1] % (1 if kind == FLOATS else 2), -rows.shape[-2] % width
    rows = F.pad(rows, (0, spare[0], 0, spare[1])) if any(spare) else rows.contiguous()
    words = rows.view(torch.int32).flatten(0, -2).unflatten(0, (-1, width))
    panels = words.transpose(1, 2).contiguous()
    return Weights(panels=panels.data_ptr(), kind=kind), panels


def _float_kind(weight: Tensor) -> int:
    """How a weight [..., ins] of fp32 or bf16 is packed without a change of its numbers."""
    if weight.dtype == torch.bfloat16:
        return HALVES
    parts = weight.detach().flatten(0, -2).split(CHUNK_ROWS)
    is_short = weight.shape[-1] % 2 == 0 and all(p.bfloat16().float().equal(p) for p in parts)
    return UPPERS if is_short else FLOATS


def pack_blocks(blocks: Blocks, width: int) -> tuple[Weights, Tensor] | None:
    """Pack a quantised weight [outs, ins] into panels of `width` outputs -> its description for C,
    and the panels' bytes, uint8 [size]; None for blocks that the kernels do not know."""
    if blocks.block not in BLOCK_SIZES:
        return None
    tables = [blocks.scales] if blocks.floors is None else [blocks.scales, blocks.floors]
    pairs = blocks.numbers.view(torch.int16).unflatten(1, (-1, blocks.block // 2))
    if blocks.is_small:  # two pairs in the bytes of one, then four in a word
        halves = (pairs[..., ::2] | pairs[..., 1::2] << 4).view(torch.uint8)
        pairs = halves.unflatten(-1, (-1, 2, 2)).transpose(-1, -2).flatten(-3).view(torch.int32)
    parts = []
    for part in (*(table.unsqueeze(2) for table in tables), pairs):
        whole = F.pad(part, (0, 0, 0, 0, 0, -len(part) % width))
        whole = whole.unflatten(0, (-1, width)).permute(0, 2, 3, 1).contiguous()
        parts.append(whole.flatten(2).view(torch.uint8))
    panels = torch.cat(parts, 2).flatten()
    weights = Weights(panels=panels.data_ptr(), block=blocks.block)
    weights.kind = NIBBLES if blocks.is_small else BYTES
    weights.has_floor = blocks.floors is not None
    weights.is_wide = blocks.scales.dtype == torch.float32
    return weights, panels


def unpacked(weights: Weights, panels: Tensor, ins: int, width: int) -> Iterator[Tensor]:
    """What `pack_floats` or `pack_blocks` packed, some panels at a time: float32 [n, ins], the last
    ones followed by outputs of 0."""
    is_quantised = weights.kind in (NIBBLES, BYTES)
    count = len(panels)
    if is_quantised:
        tables = (1 + bool(weights.has_floor)) * (4 if weights.is_wide else 2)
        numbers = weights.block // 2 if weights.kind == NIBBLES else weights.block
        count = len(panels) // (ins // weights.block * width * (tables + numbers))
    for part in panels.view(count, -1).split(max(1, UNPACKED // (ins * width))):
        if is_quantised:
            yield _unpacked_blocks(weights, part, ins, width)
        else:
            yield _unpacked_floats(weights.kind, part, ins)


def _unpacked_floats(kind: int, part: Tensor, ins: int) -> Tensor:
    """Panels int32 [n, words] of a weight of fp32 or bf16 -> float32 [outs, ins]."""
    pairs = ins if kind == FLOATS else -(-ins // 2)
    words = part.view(len(part), pairs, -1).transpose(1, 2).flatten(0, 1).contiguous()
    numbers = words.view(torch.float32 if kind == FLOATS else torch.bfloat16)
    return numbers[:, :ins].float()


def _unpacked_blocks(weights: Weights, part: Tensor, ins: int, width: int) -> Tensor:
    """Panels uint8 [n, bytes] of a quantised weight -> float32 [outs, ins]."""
    size, dtype = (4, torch.float32) if weights.is_wide else (2, torch.float16)
    whole = part.view(len(part), ins // weights.block, -1)  # of each block of P outputs
    kinds = [dtype] * (1 + bool(weights.has_floor))
    ends = [size * width] * len(kinds)
    *tables, pairs = whole.split([*ends, whole.shape[2] - sum(ends)], 2)

    def by_output(table: Tensor, kind: torch.dtype) -> Tensor:
        words = table.contiguous().view(kind).unflatten(2, (-1, width))
        outputs: Tensor = words.permute(0, 3, 1, 2).flatten(0, 1).contiguous()
        return outputs  # [outs, blocks, words]

    if weights.kind == NIBBLES:
        quads = by_output(pairs, torch.int32).view(torch.uint8).unflatten(-1, (-1, 2, 2))
        halves = quads.transpose(-1, -2).flatten(-3).view(torch.int16)
        numbers = torch.stack([halves & 0x0F0F, halves >> 4 & 0x0F0F], -1).flatten(-2)
    else:
        numbers = by_output(pairs, torch.int16)
    scale, *floor = (by_output(t, kind).float() for t, kind in zip(tables, kinds, strict=True))
    values = numbers.view(torch.int8).float().mul_(scale)
    return (values.add_(floor[0]) if floor else values).flatten(1)


# ---------------------------------------------------------------------------------------- linears


class NativeLinear(nn.Module):
    """A linear of fp32 or bf16 on a CPU with a packed weight: [..., ins] -> [..., outs], summed in
    fp32, in the input's dtype. bias: float32 [outs] or None; weights: the panels as C takes them.
    It keeps no reference to the linear that it replaces."""

    def __init__(
        self, linear: Any, library: NativeLibrary, stored: Blocks | Tensor | None = None
    ) -> None:
        """stored: what is multiplied in place of the linear's weight; None: that."""
        super().__init__()
        self.outs, self.ins = linear.weight.shape
        self.bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self._library = library
        self.panels: Tensor
        self.register_buffer("panels", None, persistent=False)
        if isinstance(stored, Blocks):
            packed, sample = pack_blocks(stored, library.panel_width), stored.values(slice(SAMPLE))
            if packed is not None:
                self.weights, self.panels = packed
                if agrees(WRONG_PRODUCT, lambda: self.off_by(sample), TOLERANCE):
                    return
            stored = None
        whole = linear.weight if stored is None else stored
        self.weights, self.panels = pack_floats(whole, library.panel_width)

    def off_by(self, weight: Tensor) -> float:
        """The largest difference of the first SAMPLE outputs from torch's product with their weight
        [n, ins] in fp32, without a bias, as a share of the largest."""
        x = torch.randn(2, self.ins, generator=torch.Generator().manual_seed(0)).bfloat16().float()
        expected = x @ weight[:SAMPLE].float().t()
        ours = self(x)[:, : expected.shape[1]]
        if self.bias is not None:
            ours = ours - self.bias[: expected.shape[1]]
        return share(ours, expected)

    @property
    def bias_address(self) -> int | None:
        """Where the bias lies; None without one."""
        return None if self.bias is None else self.bias.data_ptr()

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., ins] -> [..., outs] in the dtype of `hidden`."""
        y = self.product(hidden.reshape(-1, self.ins).float().contiguous())
        return y.view(*hidden.shape[:-1], self.outs).to(hidden.dtype)

    def weight_parts(self) -> Iterator[Tensor]:
        """The weight that is multiplied, some outputs at a time: float32 [n, ins]."""
        left = self.outs
        for part in unpacked(self.weights, self.panels, self.ins, self._library.panel_width):
            yield part[:left]
            left -= len(part)

    def product(self, x: Tensor) -> Tensor:
        """float32 [m, ins], contiguous -> float32 [m, outs]."""
        y = torch.empty(x.shape[0], self.outs)
        self._library.c.linear(byref(self.job(x, y)), self._library.threads)
        return y

    def job(self, x: Tensor, y: Tensor) -> Product:
        """The product of x float32 [>= m, ins] into y float32 [m, outs], both contiguous."""
        bias, sizes = self.bias_address, (y.shape[0], self.ins, self.outs)
        return Product(x.data_ptr(), self.weights, bias, y.data_ptr(), *sizes)


def quantised_bytes(model: nn.Module) -> int:
    """Bytes of the packed weights of a model that are quantised."""
    linears = {id(one): one for one in model.modules() if isinstance(one, NativeLinear)}
    panels = [one.panels for one in linears.values()]
    return sum(one.nbytes for one in panels if one.dtype == torch.uint8)


# ------------------------------------------------------------------------------- a model's weights


def quantise_linears(model: Any, library: NativeLibrary, storage: WeightStorage) -> int:
    """Replace the linears of a model of any family, but for its LM head, by NativeLinears where
    `storage` quantises them -> how many."""
    head, count = model.get_output_embeddings(), 0
    for name, module in list(model.named_modules()):
        linear: Any = module
        if type(module) is Conv1D:  # of gpt2: its weight is [ins, outs]
            linear = SimpleNamespace(weight=module.weight.t(), bias=module.bias)
        if type(module) in (nn.Linear, Conv1D) and module is not head:
            blocks = storage([f"{name}.weight"], linear.weight.detach())
            if isinstance(blocks, Blocks):
                quantised = NativeLinear(linear, library, blocks)
                quantised.weight = linear.weight.new_empty(0)  # some layers ask a linear its dtype
                model.set_submodule(name, quantised)
                count += 1
    return count


def convert_parameters(model: Any, dtype: torch.dtype, with_linears: bool = False) -> None:
    """Convert the parameters of a model to a dtype, those of its layers' linears only where asked:
    they are converted one by one as they are packed. Buffers stay: rotary frequencies are in
    fp32."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if with_linears or type(module) is not nn.Linear or module is head:
            for number in module.parameters(recurse=False):
                number.data = number.data.to(dtype)
