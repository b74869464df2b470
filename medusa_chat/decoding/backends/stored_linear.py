"""Stored linears: a GGUF file's blocks multiplied on a GPU as they are, and its embedding.

For 1 to 64 rows by our CUDA kernel (kernels/blocks.py), where it runs and agrees with torch; else,
and for the many rows of a prompt, a part of the weight at a time is unpacked by torch.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.backends.block_tiles import (
    FLOORED,
    KINDS,
    PIECE,
    POWERS,
    SIXES,
    STRIP,
    BlockTiles,
)
from medusa_chat.decoding.backends.kernels import blocks
from medusa_chat.decoding.backends.kernels.cuda_programs import EIGHTS
from medusa_chat.decoding.backends.parity import agrees, largest, share

Stored = BlockTiles | Tensor  # of a type that the kernel does not know: [outs, ins] in 16 bits
MOST_ROWS = 64
PIECE_ROWS = 4096  # of a file that are brought to the device at a time
TOLERANCE = 2e-2  # of half precision against its reference in fp32, of the largest output
INSTEAD = "blocks of {} are unpacked in every step"
COMPILERS = 4  # programs at a time


class StoredLinear(nn.Module):
    """A linear whose weight stays as a GGUF file has it: [..., ins] -> [..., outs] in the input's
    dtype. parts: weights whose outputs lie side by side, each of a type of its own; bias: [outs] or
    None; dtype: of the model. is_own: whether our kernel multiplies a few rows."""

    weight: Tensor  # empty: some layers ask a linear its dtype
    bias: Tensor | None

    def __init__(self, parts: Sequence[Stored], bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = _joined(parts)
        for place, part in enumerate(self.parts):  # as buffers, so that memory is counted
            held = part.data if isinstance(part, BlockTiles) else part
            self.register_buffer(f"part{place}", held, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        first = self.parts[0]
        device = first.data.device if isinstance(first, BlockTiles) else first.device
        self.register_buffer("weight", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.ins = first.ins if isinstance(first, BlockTiles) else first.shape[1]
        self.sizes = [_outs(part) for part in self.parts]
        self.outs = self.out_features = sum(self.sizes)
        self.in_features = self.ins
        self.is_own = False

    @classmethod
    def joined(cls, linears: "Sequence[StoredLinear]") -> "StoredLinear":
        """One linear with the outputs of several side by side."""
        first, bias = linears[0], None
        if any(linear.bias is not None for linear in linears):
            zeros = [first.weight.new_zeros(linear.outs) for linear in linears]
            pairs = zip(linears, zeros, strict=True)
            bias = torch.cat([zero if one.bias is None else one.bias for one, zero in pairs])
        parts = [part for linear in linears for part in linear.parts]
        return cls(parts, bias, first.weight.dtype)

    @property
    def types(self) -> set[int]:
        """ggml's types of the parts that are blocks."""
        return {part.type for part in self.parts if isinstance(part, BlockTiles)}

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., ins] -> [..., outs] in the dtype of `hidden`."""
        return self.product(hidden, hidden.dtype)

    def widened(self, hidden: Tensor) -> Tensor:
        """[..., ins] in 16 bits -> [..., outs] float32, of our kernel the sums unrounded."""
        return self.product(hidden, torch.float32)

    def product(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., ins] -> [..., outs] in a dtype, that of `hidden` or float32."""
        x = hidden.reshape(-1, self.ins).contiguous()
        out = torch.empty(len(x), self.outs, dtype=dtype, device=x.device)
        is_few = self.is_own and len(x) <= MOST_ROWS and x.dtype.itemsize == 2
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            here = out[:, start : start + size]
            if isinstance(part, Tensor):
                here.copy_(F.linear(x, part.to(x.dtype)))
            elif is_few:
                blocks.run(part, x, here)
            else:
                unpacked_product(part, x, here)
            start += size
        if self.bias is not None:
            out += self.bias.to(dtype)
        return out.view(*hidden.shape[:-1], self.outs)

    def rows(self, places: Tensor) -> Tensor:
        """The weight of the outputs `places` int64 [n]: [n, ins] in the model's dtype."""
        found, start = self.weight.new_empty(len(places), self.ins), 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            is_here = (places >= start) & (places < start + size)
            found[is_here] = _rows(part, places[is_here] - start).to(found.dtype)
            start += size
        return found


class StoredEmbedding(nn.Module):
    """An embedding whose table stays as a GGUF file has it: int64 [...] -> [..., d] in a dtype.
    scale: what a family multiplies by (Gemma), or None."""

    weight: Tensor  # empty: it has the dtype
    scale: Tensor | None

    def __init__(self, table: Stored, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        super().__init__()
        self.table = table
        held = table.data if isinstance(table, BlockTiles) else table
        self.register_buffer("held", held, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        empty = torch.empty(0, dtype=dtype, device=held.device)
        self.register_buffer("weight", empty, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., d]; it never waits for the device."""
        rows = _rows(self.table, ids.flatten()).to(self.weight.dtype)
        found: Tensor = rows.unflatten(0, ids.shape)
        return found if self.scale is None else found * self.scale.to(found.dtype)


def _rows(stored: Stored, places: Tensor) -> Tensor:
    return stored.rows(places) if isinstance(stored, BlockTiles) else stored[places]


def _outs(part: Stored) -> int:
    return part.outs if isinstance(part, BlockTiles) else len(part)


def _joined(parts: Sequence[Stored]) -> list[Stored]:
    """The same weights, neighbours of one type as one, for which there is one call of the kernel.
    Only the last of them may end within a strip."""
    runs: list[list[Stored]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if _is_next(last, part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_whole(run) for run in runs]


def _is_next(last: Stored | None, part: Stored) -> bool:
    if isinstance(last, BlockTiles) and isinstance(part, BlockTiles):
        return last.type == part.type and last.outs % STRIP == 0
    return isinstance(last, Tensor) and isinstance(part, Tensor)


def _whole(run: list[Stored]) -> Stored:
    if len(run) == 1:
        return run[0]
    tiles = [part for part in run if isinstance(part, BlockTiles)]
    floats = [part for part in run if isinstance(part, Tensor)]
    return BlockTiles.joined(tiles) if tiles else torch.cat(floats)


def unpacked_product(weight: BlockTiles, x: Tensor, out: Tensor) -> None:
    """The torch twin of the kernel, for any number of rows: write x [m, ins] times the weight to
    out [m, outs], parts of the weight unpacked to the dtype of x one after another."""
    for first, last in weight.pieces():
        out[:, first:last] = F.linear(x, weight.values(first, last).to(x.dtype))


# -------------------------------------------------------------------------------- a model's linears


def laid_out_rows(
    type: int, pieces: Iterable[Tensor], ins: int, device: torch.device
) -> BlockTiles:
    """A weight from the rows of a file in pieces, uint8 [n, bytes of a row] each: they are laid out
    on the device, so that it holds one piece twice, and the weight once."""
    parts, rest, outs = [], torch.empty(0), 0
    for piece in pieces:
        rows = piece.to(device)
        rows = torch.cat((rest, rows)) if len(rest) else rows
        outs += len(piece)
        whole = len(rows) // STRIP * STRIP
        if whole:
            parts.append(_in_pieces(type, rows[:whole], ins))
        rest = rows[whole:]
    if len(rest):
        parts.append(_in_pieces(type, rest, ins))
    return BlockTiles(type, parts[0] if len(parts) == 1 else torch.cat(parts), outs, ins)


def _in_pieces(type: int, rows: Tensor, ins: int) -> Tensor:
    """Rows laid out PIECE weights at a time: that takes several times their memory."""
    step = max(1, PIECE // ins // STRIP) * STRIP
    starts = range(0, len(rows), step)
    parts = [BlockTiles.of(type, rows[start : start + step], ins).data for start in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def store_linears(
    model: Any, rows_of: Callable[[str, Tensor], Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Replace every empty linear of a model by a StoredLinear on `device`, and its embedding where
    that is empty. rows_of: (name of a weight, the empty weight) -> StoredRows or
    UnreadRows (native_weights.py) or a matrix of floats."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    table = None
    if embedding.weight.is_meta:
        name = _name_of(model, embedding)
        table = _stored(rows_of(f"{name}.weight", embedding.weight), device, dtype)
        scale = getattr(embedding, "embed_scale", None)
        held = scale.to(device) if isinstance(scale, Tensor) else scale
        held = torch.tensor(held, device=device) if isinstance(held, float) else held
        model.set_input_embeddings(StoredEmbedding(table, dtype, held))
    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or not linear.weight.is_meta:
            continue
        if linear is head and is_tied and table is not None:
            stored = table
        else:
            stored = _stored(rows_of(f"{name}.weight", linear.weight), device, dtype)
        bias = None if linear.bias is None else linear.bias.detach()
        model.set_submodule(name, StoredLinear([stored], bias, dtype))


def _stored(found: Any, device: torch.device, dtype: torch.dtype) -> Stored:
    """StoredRows laid out on a device; of a type that the kernel does not know, or floats, in
    `dtype`."""
    if isinstance(found, Tensor):
        return found.to(device, dtype)
    found = found.whole()
    if found.type not in KINDS:
        unpacked: Tensor = found.values().to(device, dtype)
        return unpacked
    return laid_out_rows(found.type, found.data.split(PIECE_ROWS), found.ins, device)


def _name_of(model: nn.Module, module: nn.Module) -> str:
    found: str = next(name for name, one in model.named_modules() if one is module)
    return found


def use_kernels(model: nn.Module) -> list[str]:
    """Let the model's stored linears use our kernel where it agrees with torch on their device; a
    sentence for each type of blocks."""
    linears = [module for module in model.modules() if isinstance(module, StoredLinear)]
    if not linears:
        return []
    first = linears[0].weight
    types = sorted(set().union(*(linear.types for linear in linears)))
    if first.device.type == "cuda" and first.dtype.itemsize == 2:
        compile_all(first.device, first.dtype, types)
    own = {type for type in types if has_kernel(first.device, first.dtype, type)}
    for linear in linears:
        linear.is_own = linear.types <= own
    return [_said(type, type in own) for type in types]


def _said(type: int, is_own: bool) -> str:
    name = KINDS[type].name
    if is_own:
        return f"{name}: the file's own blocks are multiplied, up to {MOST_ROWS} rows by our kernel"
    return f"{INSTEAD.format(name)}, which is slower than 16 bits: no kernel of ours runs here"


def compile_all(device: torch.device, dtype: torch.dtype, types: Iterable[int]) -> None:
    """Compile the kernel's programs side by side; what fails says so where it is used."""
    asked = [(device, dtype, e, t, wide) for e in EIGHTS for t in types for wide in (False, True)]
    with ThreadPoolExecutor(COMPILERS) as pool:
        for made in [pool.submit(blocks.compiled, *one) for one in asked]:
            made.exception()


@cache
def has_kernel(device: torch.device, dtype: torch.dtype, type: int) -> bool:
    """Whether the kernel runs there and agrees with its reference; if not, that is logged, once."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    what = INSTEAD.format(KINDS[type].name)
    return agrees(what, lambda: difference(device, dtype, type), TOLERANCE)


def difference(device: torch.device, dtype: torch.dtype, type: int) -> float:
    """The kernel's largest difference from its reference in fp32 on random blocks, as a share of
    the largest output, over every program and over sizes that are no whole tiles."""
    generator = torch.Generator().manual_seed(0)
    ins = (512, 2304) if KINDS[type].block == 256 else (96, 2272)
    sizes = [(rows, 200, ins[rows % 2]) for rows in (1, 8, 16, 17, 32, 33, 64)]
    return largest(
        off(blocks.run, generator, device, dtype, type, *size, is_wide)
        for size in sizes
        for is_wide in (False, True)
    )


def off(
    run: Any,
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
    type: int,
    rows: int,
    outs: int,
    ins: int,
    is_wide: bool = False,
) -> float:
    """The same for one size, of `run` as kernels/blocks.py has it."""
    weight = BlockTiles.of(type, random_rows(type, outs, ins, generator).to(device), ins)
    x = torch.randn(rows, ins, generator=generator).to(device, dtype)
    out = torch.full((rows, outs + 8), torch.nan, device=device).to(
        torch.float32 if is_wide else dtype
    )[:, :outs]
    run(weight, x, out)
    return share(out, F.linear(x.float(), weight.values()))


def random_rows(type: int, outs: int, ins: int, generator: torch.Generator) -> Tensor:
    """Rows as a file has them, uint8 [outs, bytes], on the CPU: any codes, and small scales."""
    kind, shape = KINDS[type], (outs, ins // KINDS[type].block)
    raw = torch.randint(256, (*shape, kind.size), generator=generator).to(torch.uint8)
    if kind.scales == POWERS:
        raw[..., 0] = torch.randint(118, 124, shape, generator=generator).to(torch.uint8)
        return raw.flatten(1)
    starts = [kind.size - 2] if kind.name == "Q6_K" else [0]
    starts += [2] if kind.scales in (FLOORED, SIXES) else []
    for start in starts:
        scales = torch.rand(*shape, 1, generator=generator) - 0.3
        raw[..., start : start + 2] = (scales / 8).half().view(torch.uint8)
    return raw.flatten(1)
