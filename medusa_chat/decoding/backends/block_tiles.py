"""Block tiles: a GGUF tensor laid out once for kernels/blocks.cu, in the same bytes.

Sixteen outputs lie together, and of them one unit of inputs after another: 64, or the 256 of a
K-quant, whose scales share a number. A unit is a tile: planes of the codes' 4 (or 8) lower bits, of
their upper bits, and of scales. Sixteen inputs that a thread multiplies are side by side, so that a
warp copies and reads whole lines. Formats: ggml's quants (ggml-common.h).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # inputs that the four threads of an output take at a time
STRIP = 16  # outputs of a tile
PIECE = 1 << 24  # weights that are unpacked at a time
HALVES, FLOORED, SIXES, BYTES, NONLINEAR, POWERS = range(6)  # how scales lie, as in blocks.cu
NL4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled: a scale is half


@dataclass(frozen=True)
class BlockKind:
    """How one of ggml's types is laid out. block, size: weights and bytes of a block in the file;
    bits: of a code; centre: the code that stands for 0, where that is no table's; scales: how they
    lie, `fields` of each unit of an output, as (how many, bytes of one); table: the numbers of the
    codes."""

    name: str
    block: int
    size: int
    bits: int
    scales: int
    fields: tuple[tuple[int, int], ...]
    centre: int = 0
    group: int = 32
    table: tuple[int, ...] = ()

    @property
    def unit(self) -> int:
        """Inputs of a tile."""
        return max(BLOCK, self.block)

    @property
    def has_floor(self) -> bool:
        """Whether a number is added to each weight of a group."""
        return self.scales in (FLOORED, SIXES)

    @property
    def codes(self) -> tuple[int, ...]:
        """Bytes that a thread has of 16 codes, plane by plane."""
        planes = {4: (8,), 5: (8, 2), 6: (8, 4), 8: (16,)}
        return planes[self.bits]

    @property
    def tile(self) -> int:
        """Bytes of a tile."""
        scales = sum(count * size for count, size in self.fields)
        return STRIP * (4 * sum(self.codes) * self.unit // BLOCK + scales)


_HALF, _SIXES = (2, 2), ((1, 2), (1, 2), (1, 12))
KINDS = {
    2: BlockKind("Q4_0", 32, 18, 4, HALVES, (_HALF,), 8),
    3: BlockKind("Q4_1", 32, 20, 4, FLOORED, (_HALF, _HALF)),
    6: BlockKind("Q5_0", 32, 22, 5, HALVES, (_HALF,), 16),
    7: BlockKind("Q5_1", 32, 24, 5, FLOORED, (_HALF, _HALF)),
    8: BlockKind("Q8_0", 32, 34, 8, HALVES, (_HALF,)),
    12: BlockKind("Q4_K", 256, 144, 4, SIXES, _SIXES),
    13: BlockKind("Q5_K", 256, 176, 5, SIXES, _SIXES),
    14: BlockKind("Q6_K", 256, 210, 6, BYTES, ((1, 2), (1, 16)), 32, group=16),
    20: BlockKind("IQ4_NL", 32, 18, 4, HALVES, (_HALF,), table=NL4),
    23: BlockKind("IQ4_XS", 256, 136, 4, NONLINEAR, ((1, 2), (1, 2), (1, 4)), table=NL4),
    39: BlockKind("MXFP4", 32, 17, 4, POWERS, ((2, 1),), table=FP4),
}


@dataclass(frozen=True)
class BlockTiles:
    """A weight [outs, ins] in tiles. type: a key of KINDS; data: uint8 [strips, bytes of a strip],
    on any device."""

    type: int
    data: Tensor
    outs: int
    ins: int

    @property
    def kind(self) -> BlockKind:
        """Of its blocks."""
        return KINDS[self.type]

    @classmethod
    def of(cls, type: int, rows: Tensor, ins: int) -> "BlockTiles":
        """From the rows of a file, uint8 [outs, bytes of a row], on their device."""
        return cls(type, laid_out(KINDS[type], rows, ins), len(rows), ins)

    @classmethod
    def joined(cls, parts: "list[BlockTiles]") -> "BlockTiles":
        """One weight with the outputs of several of one type side by side, whole strips each but
        for the last."""
        first = parts[0]
        data = torch.cat([part.data for part in parts])
        return cls(first.type, data, sum(part.outs for part in parts), first.ins)

    def values(self, first: int = 0, last: int | None = None) -> Tensor:
        """The weights of the outputs from `first`, a multiple of STRIP, up to `last`, float32
        [n, ins], to the bit what the `gguf` package gives."""
        last = self.outs if last is None else last
        strips = self.data[first // STRIP : -(-last // STRIP)]
        fields = [field.flatten(0, 1)[: last - first] for field in self._fields(strips)]
        return self._decoded(fields)

    def rows(self, places: Tensor) -> Tensor:
        """The weights of the outputs at `places` int64 [n], float32 [n, ins]; it never waits for
        the device."""
        strip, output = places // STRIP, places % STRIP
        return self._decoded([field[strip, output] for field in self._fields(self.data)])

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(first, last) output of parts of at most PIECE weights."""
        step = max(1, PIECE // self.ins // STRIP) * STRIP
        for first in range(0, self.outs, step):
            yield first, min(first + step, self.outs)

    def _fields(self, strips: Tensor) -> list[Tensor]:
        """What the planes hold, as views [strips, STRIP, units, ...]: of codes [..., blocks of
        BLOCK, 4 threads, bytes], of scales [..., how many, bytes of one]."""
        kind, found, start = self.kind, [], 0
        tiles = strips.unflatten(1, (-1, kind.tile))
        for size in kind.codes:
            count = STRIP * 4 * size * kind.unit // BLOCK
            plane = tiles[:, :, start : start + count]
            view = plane.unflatten(2, (kind.unit // BLOCK, STRIP, 4, size))
            found.append(view.permute(0, 3, 1, 2, 4, 5))
            start += count
        for many, size in kind.fields:
            plane = tiles[:, :, start : start + STRIP * many * size]
            found.append(plane.unflatten(2, (many, STRIP, size)).permute(0, 3, 1, 2, 4))
            start += STRIP * many * size
        return found

    def _decoded(self, fields: list[Tensor]) -> Tensor:
        """Fields [n, units, ...] of some outputs -> float32 [n, ins]."""
        kind = self.kind
        planes = len(kind.codes)
        codes = in_order(kind, merged_codes(kind, fields[:planes]))  # [n, units, unit]
        if kind.table:
            numbers = torch.tensor(kind.table, dtype=torch.float32, device=codes.device)[
                codes.int()
            ]
        elif kind.bits == 8:
            numbers = codes.view(torch.int8).float()
        else:
            numbers = codes.float() - kind.centre
        scales, floors = scales_of(kind, [field.contiguous() for field in fields[planes:]])
        values = numbers.unflatten(2, (-1, kind.group)) * scales.unsqueeze(3)
        if floors is not None:
            values += floors.unsqueeze(3)
        found: Tensor = values.flatten(1)[:, : self.ins]
        return found


# ------------------------------------------------------------------------------ from and to planes


def laid_out(kind: BlockKind, rows: Tensor, ins: int) -> Tensor:
    """Rows of a file uint8 [outs, bytes] -> tiles, uint8 [strips, bytes of a strip]."""
    outs, blocks = len(rows), rows.shape[1] // kind.size
    assert blocks * kind.block == ins, (kind.name, ins, rows.shape)
    each = kind.unit // kind.block
    spare = -outs % STRIP, -blocks % each
    raw = rows.unflatten(1, (blocks, kind.size))
    if any(spare):
        raw = torch.nn.functional.pad(raw, (0, 0, 0, spare[1], 0, spare[0]))
    raw = raw.unflatten(1, (-1, each))  # [outs, units, blocks of the file, bytes]
    codes, fields = _READ[kind.name](raw)
    parts = []
    for plane in split_codes(kind, threaded(kind, codes.flatten(2))):
        whole = plane.unflatten(0, (-1, STRIP)).permute(0, 2, 3, 1, 4, 5)
        parts.append(whole.flatten(2))
    for field in fields:
        parts.append(field.unflatten(0, (-1, STRIP)).permute(0, 2, 3, 1, 4).flatten(2))
    return torch.cat(parts, 2).flatten(1)


def threaded(kind: BlockKind, codes: Tensor) -> Tensor:
    """Codes [n, units, unit] in their order -> [n, units, blocks of BLOCK, 4 threads, 16]."""
    each = kind.group // 4  # inputs that a thread has of a group
    groups = codes.unflatten(2, (-1, BLOCK // kind.group, 4, each))
    found: Tensor = groups.transpose(3, 4).flatten(4)
    return found


def in_order(kind: BlockKind, codes: Tensor) -> Tensor:
    """The reverse of `threaded`."""
    each = kind.group // 4
    found: Tensor = codes.unflatten(4, (-1, each)).transpose(3, 4).flatten(2)
    return found


def split_codes(kind: BlockKind, codes: Tensor) -> list[Tensor]:
    """Codes uint8 [..., 16] of a thread -> its bytes in each plane.

    Two codes side by side are a pair, which a thread multiplies by at once. Lower bits: of four
    pairs the first codes, then the second ones, in the halves of four bytes; where a table gives
    the numbers, a byte holds a pair, its first code in the upper half. Upper bits: of eight pairs
    the first codes', then the second ones'."""
    if kind.bits == 8:
        return [codes]
    pairs = codes.unflatten(-1, (8, 2))
    low = pairs & 15
    if kind.table:
        return [low[..., 0] << 4 | low[..., 1]]
    order = low.unflatten(-2, (2, 4)).transpose(-1, -2).flatten(-3).unflatten(-1, (8, 2))
    planes = [order[..., 0] | order[..., 1] << 4]
    if kind.bits > 4:
        wide = kind.bits - 4
        upper = (pairs >> 4).transpose(-1, -2).unflatten(-1, (-1, 8 // wide))
        planes.append(_packed_bits(upper, wide).flatten(-2))
    return planes


def merged_codes(kind: BlockKind, planes: list[Tensor]) -> Tensor:
    """The reverse of `split_codes`."""
    low = planes[0]
    if kind.bits == 8:
        return low
    if kind.table:
        return torch.stack((low >> 4, low & 15), -1).flatten(-2)
    halves = torch.stack((low & 15, low >> 4), -1).flatten(-2)
    pairs = halves.unflatten(-1, (2, 2, 4)).transpose(-1, -2).flatten(-3, -2)  # [..., 8, 2]
    if kind.bits > 4:
        wide = kind.bits - 4
        shifts = torch.arange(0, 8, wide, dtype=torch.uint8, device=low.device)
        upper = planes[1].unsqueeze(-1) >> shifts & (1 << wide) - 1
        pairs = pairs | upper.flatten(-2).unflatten(-1, (2, 8)).transpose(-1, -2) << 4
    found: Tensor = pairs.flatten(-2)
    return found


def _packed_bits(numbers: Tensor, wide: int) -> Tensor:
    """uint8 [..., 8 / wide] of `wide` bits each -> one byte, the first lowest."""
    whole = numbers[..., 0].clone()
    for place in range(1, 8 // wide):
        whole |= numbers[..., place] << wide * place
    return whole


def scales_of(kind: BlockKind, fields: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Fields uint8 [n, units, how many, bytes] -> what multiplies each group's numbers, and what is
    added, float32 [n, units, groups of a unit], or None."""
    if kind.scales == POWERS:
        return _half_power(fields[0].squeeze(3)), None
    numbers = [_halves(field) for field in fields if field.shape[3] == 2]
    if kind.scales == HALVES:
        return numbers[0], None
    if kind.scales == FLOORED:
        return numbers[0], numbers[1]
    small = fields[-1].squeeze(2)
    if kind.scales == BYTES:
        return numbers[0] * small.view(torch.int8).float(), None
    if kind.scales == NONLINEAR:
        low = torch.stack((small & 15, small >> 4), -1).flatten(2).int()
        high = fields[1].int()
        high = high[:, :, 0, :1] | high[:, :, 0, 1:] << 8
        high = high >> torch.arange(0, 16, 2, dtype=torch.int32, device=high.device) & 3
        return numbers[0] * ((low | high << 4) - 32).float(), None
    first, second, third = small.split(4, 2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 2)
    floors = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 2)
    return numbers[0] * scales.float(), -(numbers[1] * floors.float())


def _halves(field: Tensor) -> Tensor:
    """uint8 [..., 2] -> float32 [...]."""
    return field.view(torch.float16).squeeze(-1).float()


def _half_power(exponents: Tensor) -> Tensor:
    """Half of the power of two that a byte stands for (E8M0), float32."""
    wide = exponents.int()
    bits = torch.where(wide < 2, 0x00200000 << wide.clamp(max=1), (wide - 1).clamp(min=0) << 23)
    return bits.view(torch.float32)


# -------------------------------------------------------------------------------- of ggml's blocks
# raw uint8 [n, units, blocks, bytes] -> codes [n, units, blocks, weights], and fields for `fields`

Read = tuple[Tensor, list[Tensor]]


def _nibbles(stored: Tensor) -> Tensor:
    """The lower halves of bytes [..., k], then the upper ones: [..., 2 k]."""
    return torch.cat((stored & 15, stored >> 4), -1)


def _bits(stored: Tensor) -> Tensor:
    """Of bytes [..., k] each bit in turn: [..., 8 k]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=stored.device)
    return (stored.unsqueeze(-1) >> shifts & 1).flatten(-2)


def _q4(raw: Tensor, scales: int = 1, wide: int = 2) -> Read:
    fields = [raw[..., wide * i : wide * (i + 1)] for i in range(scales)]
    return _nibbles(raw[..., wide * scales :]), fields


def _q4_1(raw: Tensor) -> Read:
    return _q4(raw, 2)


def _mxfp4(raw: Tensor) -> Read:
    return _q4(raw, 1, 1)


def _q5(raw: Tensor, scales: int = 1) -> Read:
    start = 2 * scales
    codes = _nibbles(raw[..., start + 4 :]) | _bits(raw[..., start : start + 4]) << 4
    return codes, [raw[..., 2 * i : 2 * i + 2] for i in range(scales)]


def _q5_1(raw: Tensor) -> Read:
    return _q5(raw, 2)


def _q8_0(raw: Tensor) -> Read:
    return raw[..., 2:], [raw[..., :2]]


def _k_nibbles(stored: Tensor, line: int) -> Tensor:
    """Of every `line` bytes the lower halves, then the upper ones."""
    return _nibbles(stored.unflatten(-1, (-1, line))).flatten(-2)


def _k_fields(raw: Tensor) -> list[Tensor]:
    return [raw[..., :2], raw[..., 2:4], raw[..., 4:16]]


def _q4_k(raw: Tensor) -> Read:
    return _k_nibbles(raw[..., 16:], 32), _k_fields(raw)


def _q5_k(raw: Tensor) -> Read:
    upper = _bits(raw[..., 16:48]).unflatten(-1, (32, 8)).transpose(-1, -2).flatten(-2)
    return _k_nibbles(raw[..., 48:], 32) | upper << 4, _k_fields(raw)


def _q6_k(raw: Tensor) -> Read:
    low = _k_nibbles(raw[..., :128], 64)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)
    high = raw[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts.unsqueeze(1) & 3
    return low | high.flatten(-3) << 4, [raw[..., 208:], raw[..., 192:208]]


def _iq4_xs(raw: Tensor) -> Read:
    fields = [raw[..., :2], raw[..., 2:4], raw[..., 4:8]]
    return _nibbles(raw[..., 8:].unflatten(-1, (-1, 16))).flatten(-2), fields


_READ = {
    **{"Q4_0": _q4, "Q4_1": _q4_1, "Q5_0": _q5, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k},
    **{"Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _q4, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4},
}
