"""Native weights: what the C library multiplies, packed once at a load, and NativeLinear.

A weight is fp32, bf16, or the rows of a GGUF file's own blocks. Packed, the weights of P outputs
lie side by side: a panel (kernels/weights.h).
"""

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.backends.native_library import NativeLibrary, Product, Weights
from medusa_chat.decoding.backends.parity import share
from medusa_chat.decoding.layer_forms import are_experts

WIDEST_PANEL = 32  # outputs, on any CPU
FLOATS, HALVES, UPPERS = range(3)  # kernels/weights.h
PACKED = 16  # the same: plus a type of ggml
Q4_1, Q8_0 = 3, 8  # types of ggml
HUGE = 2**21  # bytes of a huge page
CHUNK_ROWS = 4096  # rows of a weight that are examined at a time
UNPACKED = 2**20  # weights that are unpacked at a time, a few MB of fp32

ROWS = 256  # of a weight that are rounded at a time: a few MB of fp32
INPUTS = 32  # of a block that is made here
TINY = 1e-30  # in place of a scale of 0
TABLES = {"lm_head.weight", "model.embed_tokens.weight"}  # of which an LM head is made

DISABLED = "native backend disabled"
TOLERANCE, SAMPLE = 0.02, 64  # of the difference from torch's product; outputs that are compared


@dataclass(frozen=True)
class StoredRows:
    """A quantised weight [outs, ins] as a GGUF file stores it. type: ggml's number; data: uint8
    [outs, bytes of a row]."""

    type: int
    data: Tensor
    ins: int

    @property
    def outs(self) -> int:
        """How many rows there are."""
        return len(self.data)

    @property
    def kind(self) -> int:
        """The kind of weights for C."""
        return PACKED + self.type

    def values(self, rows: slice = slice(None)) -> Tensor:
        """The weights of some rows, float32 [n, ins], as gguf has them."""
        import gguf  # half a second, and few need it

        stored = self.data[rows].numpy()
        found = gguf.dequantize(stored, gguf.GGMLQuantizationType(self.type))
        return torch.from_numpy(found.reshape(len(stored), self.ins))

    def rows(self, places: Tensor | slice) -> "StoredRows":
        """The rows at `places` int64 [n] alone, or a slice of them."""
        return StoredRows(self.type, self.data[places], self.ins)

    def pieces(self) -> Iterator["StoredRows"]:
        """All rows, as UnreadRows has them some at a time."""
        yield self

    def whole(self) -> "StoredRows":
        """All rows."""
        return self

    def ready(self) -> None:
        """See UnreadRows."""

    @classmethod
    def of(cls, weight: Tensor, bits: int = 8) -> "StoredRows":
        """Rows near a weight [outs, ins], ins a multiple of INPUTS: of 8 bits (Q8_0), or of 4 with
        floors (Q4_1)."""
        round_part = _nearest_bytes if bits == 8 else _nearest_nibbles
        parts = [round_part(part.float().unflatten(1, (-1, INPUTS))) for part in weight.split(ROWS)]
        return cls(Q8_0 if bits == 8 else Q4_1, torch.cat(parts), weight.shape[1])


@dataclass(frozen=True)
class UnreadRows:
    """A quantised weight [outs, ins] that is read only as it is packed. type: see StoredRows; read:
    its rows, some at a time, uint8 [n, bytes of a row], each valid until the next is asked for;
    ready: what pack_rows makes of them, where it was made before; else None."""

    type: int
    outs: int
    ins: int
    read: Callable[[], Iterator[Tensor]]
    ready: Callable[[], tuple[Weights, Tensor] | None] = lambda: None

    def pieces(self) -> Iterator[StoredRows]:
        """Its rows, some at a time, each valid until the next is asked for."""
        return (StoredRows(self.type, data, self.ins) for data in self.read())

    def whole(self) -> StoredRows:
        """All rows at once."""
        return StoredRows(self.type, torch.cat([data.clone() for data in self.read()]), self.ins)


def rounded_inputs(x: Tensor) -> Tensor:
    """What C multiplies with stored rows in place of x float32 [..., ins]: whole numbers of 8 bits,
    times one scale for each INPUTS of them."""
    parts = x.unflatten(-1, (-1, INPUTS))
    steps = (parts.abs().amax(-1, True) / 127).clamp(min=TINY)
    found: Tensor = (parts / steps).round() * steps
    return found.flatten(-2)


def _nearest_bytes(x: Tensor) -> Tensor:
    """x float32 [n, blocks, INPUTS] -> rows of Q8_0, uint8 [n, bytes]."""
    scales = (x.abs().amax(2, True) / 127).half()
    numbers = (x / scales.float().clamp(min=TINY)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], 2).flatten(1)


def _nearest_nibbles(x: Tensor) -> Tensor:
    """x float32 [n, blocks, INPUTS] -> rows of Q4_1, uint8 [n, bytes]: scales and floors are those
    of the line by least squares through x and its places in its range, which is a fifth nearer to
    normal weights than nf4's 16 values."""
    least = x.amin(2, True)
    step = ((x.amax(2, True) - least) / 15).clamp_(min=TINY)
    numbers = ((x - least) / step).round_()
    mean, middle = x.mean(2, True), numbers.mean(2, True)
    away = numbers - middle
    spread = away.square().sum(2, True).clamp_(min=TINY)
    scales = ((away * x).sum(2, True) / spread).half()
    floors = (mean - scales.float() * middle).half()
    numbers = ((x - floors.float()) / scales.float().clamp_(min=TINY)).round_().clamp_(0, 15)
    low, high = numbers.to(torch.uint8).chunk(2, 2)
    return torch.cat(
        [scales.view(torch.uint8), floors.view(torch.uint8), low | high << 4], 2
    ).flatten(1)


class WeightStorage:
    """How the weights of a model are stored in memory where the C library multiplies them:
    unchanged, or in a dtype, to which the rest of the model is then converted too. bytes: of what
    it holds itself, and the model does not."""

    bytes = 0

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def __call__(self, name: str, weight: Tensor) -> StoredRows | UnreadRows | Tensor:
        """What is multiplied in place of a weight [outs, ins], that of the tensor of this name:
        stored rows, or numbers of fp32 or bf16."""
        return weight if self.dtype is None else weight.to(self.dtype)

    def experts(self, name: str, weight: Tensor, half: int | None) -> Iterator[StoredRows | Tensor]:
        """What is multiplied in place of each expert's matrix of a weight [count, outs, ins]. name:
        of the tensor of all, of which these are the gates (half 0), the ups (1), or the whole."""
        for one in weight:
            found = self(name, one)
            yield found.whole() if isinstance(found, UnreadRows) else found


class Quantised(WeightStorage):
    """Rows made of the model's weights: of 8 bits, or of 4 but for the LM head."""

    def __init__(self, bits: int) -> None:
        super().__init__(torch.bfloat16)
        self.bits = bits

    def __call__(self, name: str, weight: Tensor) -> StoredRows | Tensor:
        """The rows nearest to a weight; in bf16 where its inputs are not whole blocks."""
        if weight.shape[1] % INPUTS:
            return weight.bfloat16()
        return StoredRows.of(weight, 8 if name in TABLES else self.bits)


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


def pack_rows(
    pieces: Iterable[StoredRows], outs: int, library: NativeLibrary
) -> tuple[Weights, Tensor] | None:
    """Pack the rows of a quantised weight, piece by piece, into panels -> its description for C,
    and the panels' bytes, uint8 [size]; None for a type that C does not know. outs: of all."""
    weights, panels, at = Weights(), torch.empty(0, dtype=torch.uint8), 0
    for piece in pieces:
        if at == 0:
            size = library.c.packed_size(piece.kind, outs, piece.ins)
            if size == 0:
                return None
            panels = huge_zeros(size)
            weights = Weights(panels.data_ptr(), piece.kind)
        data = piece.data.contiguous()
        places = data.data_ptr(), panels.data_ptr()
        library.c.pack(piece.kind, *places, at, piece.outs, piece.ins, library.threads)
        at += piece.outs
    return weights, panels


def huge_zeros(size: int) -> Tensor:
    """Bytes of 0, uint8 [size], in huge pages where the system has them and one would be filled: a
    CPU then looks up where memory lies once for 2 MB, not 512 times."""
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    whole = mmap.mmap(-1, size + HUGE)
    with suppress(OSError):  # a kernel without them
        whole.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(whole, dtype=torch.uint8)
    start = -found.data_ptr() % HUGE
    return found[start : start + size]


def unpacked(
    weights: Weights,
    ins: int,
    places: Tensor,
    library: NativeLibrary,
    room: Tensor | None = None,
) -> Tensor:
    """The outputs at `places` int64 [n] of a packed weight of any kind: float32 [n, ins], in the
    first rows of `room` float32 [>= n, ins] where that is given."""
    found = torch.empty(len(places), ins) if room is None else room[: len(places)]
    places = places.contiguous()
    library.c.unpack(byref(weights), ins, places.data_ptr(), len(places), found.data_ptr())
    return found


# ---------------------------------------------------------------------------------------- linears


class NativeLinear(nn.Module):
    """A linear on a CPU with a packed weight: [..., ins] -> [..., outs], summed in fp32, in the
    input's dtype. bias: float32 [outs] or None; weights: the panels as C takes them. It keeps no
    reference to the linear that it replaces."""

    def __init__(
        self,
        linear: Any,
        library: NativeLibrary,
        stored: StoredRows | UnreadRows | Tensor | None = None,
    ) -> None:
        """stored: what is multiplied in place of the linear's weight; None: that."""
        super().__init__()
        self.outs, self.ins = linear.weight.shape
        self.bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self._library = library
        self.panels: Tensor
        self.register_buffer("panels", None, persistent=False)
        if isinstance(stored, StoredRows | UnreadRows):
            packed = stored.ready() or pack_rows(stored.pieces(), self.outs, library)
            if packed is not None:
                self.weights, self.panels = packed
                return
            stored = stored.whole().values().bfloat16() if linear.weight.is_meta else None
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

    def rounded(self, x: Tensor) -> Tensor:
        """What is multiplied in place of x float32 [..., ins], of the same shape and dtype."""
        if self.weights.kind >= PACKED:
            return rounded_inputs(x)
        return x.bfloat16().float() if self.weights.kind == HALVES else x

    def weight_parts(self) -> Iterator[Tensor]:
        """The weight that is multiplied, some outputs at a time: float32 [n, ins], each valid until
        the next is asked for."""
        room = torch.empty(max(1, UNPACKED // self.ins), self.ins)
        for places in torch.arange(self.outs).split(len(room)):
            yield unpacked(self.weights, self.ins, places, self._library, room)

    def rows(self, places: Tensor) -> Tensor:
        """The weights of the outputs at `places` int64 [n]: float32 [n, ins]."""
        return unpacked(self.weights, self.ins, places, self._library)

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
    held = (getattr(one, "panels", None) for one in model.modules())
    panels = {
        one.data_ptr(): one.nbytes
        for one in held
        if isinstance(one, Tensor) and one.dtype == torch.uint8
    }
    return sum(panels.values())


# ------------------------------------------------------------------------------- a model's weights


def quantise_linears(model: Any, library: NativeLibrary, storage: WeightStorage) -> int:
    """Replace the linears of a model of any family, but for its LM head, by NativeLinears where
    `storage` quantises them -> how many. Those that are empty get what it has of them."""
    from transformers.pytorch_utils import Conv1D  # seconds, and packing does not need them

    head, count = model.get_output_embeddings(), 0
    for name, module in list(model.named_modules()):
        linear: Any = module
        if type(module) is Conv1D:  # of gpt2: its weight is [ins, outs]
            linear = SimpleNamespace(weight=module.weight.t(), bias=module.bias)
        if type(module) in (nn.Linear, Conv1D) and module is not head:
            rows = storage(f"{name}.weight", linear.weight.detach())
            if isinstance(rows, StoredRows | UnreadRows):
                quantised = NativeLinear(linear, library, rows)
                quantised.weight = linear.weight.new_empty(0)  # some layers ask a linear its dtype
                model.set_submodule(name, quantised)
                count += 1
            elif linear.weight.is_meta:
                linear.weight = nn.Parameter(rows, requires_grad=False)
    return count


def convert_parameters(model: Any, dtype: torch.dtype, with_linears: bool = False) -> None:
    """Convert the parameters of a model to a dtype, those of its layers' linears and experts only
    where asked: they are converted one by one as they are packed. Buffers stay: rotary frequencies
    are in fp32."""
    head = model.get_output_embeddings()
    for module in model.modules():
        is_packed = type(module) is nn.Linear or are_experts(module)
        if with_linears or not is_packed or module is head:
            for number in module.parameters(recurse=False):
                number.data = number.data.to(dtype)
