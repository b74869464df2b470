"""Native experts: the experts of a mixture's layer, packed once at a load, and multiplied by C.

They stay as they are stored: an expert's rows are read where a row of a pass chose it, and nothing
is unpacked. Both the pass in C and the layers of transformers multiply these.
"""

from collections.abc import Iterable, Iterator
from ctypes import byref
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backends.native_library import Linear, NativeLibrary, Product, Weights
from medusa_chat.decoding.backends.native_weights import (
    StoredRows,
    WeightStorage,
    huge_zeros,
    pack_floats,
)
from medusa_chat.decoding.layer_forms import DOWNS, GATES_UPS, are_experts


class NativeStack(nn.Module):
    """Matrices [outs, ins], one for each expert, packed one behind the other. bias: float32
    [count, outs] or None; weights: the panels of all as C takes them."""

    def __init__(
        self,
        experts: Iterable[StoredRows | Tensor],
        count: int,
        bias: Tensor | None,
        library: NativeLibrary,
    ) -> None:
        """experts: `count` weights of one shape, all stored alike."""
        super().__init__()
        pieces = iter(experts)
        first = next(pieces)
        self.count = count
        self.outs, self.ins = (
            (first.outs, first.ins) if isinstance(first, StoredRows) else first.shape
        )
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._library = library
        self.panels: Tensor
        everything = chain([first], pieces)
        if isinstance(first, StoredRows) and library.c.packed_size(*_form(first)):
            self.weights, panels = self._packed(first, everything)
        else:
            floats = [x.values().bfloat16() if isinstance(x, StoredRows) else x for x in everything]
            self.weights, panels = pack_floats(torch.stack(floats), library.panel_width)
        self.register_buffer("panels", panels, persistent=False)

    def _packed(
        self, first: StoredRows, pieces: Iterable[StoredRows | Tensor]
    ) -> tuple[Weights, Tensor]:
        c, threads = self._library.c, self._library.threads
        each = c.packed_size(*_form(first))
        panels = huge_zeros(each * self.count)
        for number, piece in enumerate(pieces):
            assert isinstance(piece, StoredRows) and piece.type == first.type
            data, to = piece.data.contiguous(), panels.data_ptr() + number * each
            c.pack(first.kind, data.data_ptr(), to, 0, self.outs, self.ins, threads)
        return Weights(panels.data_ptr(), first.kind), panels

    @property
    def linear(self) -> Linear:
        """All of them for C, which points at memory of this one."""
        return Linear(self.weights, None if self.bias is None else self.bias.data_ptr())

    def product(self, expert: int, x: Tensor) -> Tensor:
        """float32 [m, ins], contiguous -> float32 [m, outs] by one expert."""
        y = torch.empty(len(x), self.outs)
        weights = Weights.from_buffer_copy(self.weights)
        weights.panels += expert * (self.panels.nbytes // self.count)
        bias = None if self.bias is None else self.bias[expert].data_ptr()
        sizes = len(x), self.ins, self.outs
        job = Product(x.data_ptr(), weights, bias, y.data_ptr(), *sizes)
        self._library.c.linear(byref(job), self._library.threads)
        return y


def _form(rows: StoredRows) -> tuple[int, int, int]:
    """Their kind, outs and ins."""
    return rows.kind, rows.outs, rows.ins


class NativeExperts(nn.Module):
    """In place of the experts of a layer of transformers: (rows [n, d], experts int64 [n, k], their
    shares [n, k]) -> [n, d], in the dtype of the rows."""

    def __init__(
        self, stock: Any, name: str, library: NativeLibrary, storage: WeightStorage
    ) -> None:
        """stock: a module that `are_experts`, which gives up its weights; name: its own in the
        model, by which `storage` knows them."""
        super().__init__()
        weights = {key: getattr(stock, key) for key in (GATES_UPS, DOWNS)}
        biases = {key: getattr(stock, f"{key}_bias", None) for key in weights}
        turned = {
            key: one.detach().transpose(1, 2) if stock.is_transposed else one.detach()
            for key, one in weights.items()
        }
        halves = _halves(turned[GATES_UPS], 1, stock.is_concatenated)
        biased: tuple[Tensor | None, Tensor | None] = (None, None)
        if (bias := biases[GATES_UPS]) is not None:
            biased = _halves(bias.detach(), 1, stock.is_concatenated)
        made = []
        for half in (0, 1):
            rows = storage.experts(f"{name}.{GATES_UPS}", halves[half], half)
            made.append(NativeStack(rows, len(halves[half]), biased[half], library))
        self.gate, self.up = made
        rows = storage.experts(f"{name}.{DOWNS}", turned[DOWNS], None)
        self.down = NativeStack(rows, len(turned[DOWNS]), biases[DOWNS], library)
        for key in weights:
            setattr(stock, key, None)
            if biases[key] is not None:
                setattr(stock, f"{key}_bias", None)
        self.stock = stock

    def forward(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """See the class."""
        x, out = rows.float(), torch.zeros(rows.shape)
        for expert in chosen.unique().tolist():
            at, slot = torch.where(chosen == expert)
            mine = x[at].contiguous()
            both = self.gate.product(expert, mine), self.up.product(expert, mine)
            joined = torch.cat(both, -1) if self.stock.is_concatenated else _laced(*both)
            found = self.down.product(expert, self.stock._apply_gate(joined).contiguous())
            out.index_add_(0, at, found * shares[at, slot, None].float())
        return out.to(rows.dtype)


def _halves(both: Tensor, axis: int, is_concatenated: bool) -> tuple[Tensor, Tensor]:
    """The part of the gates and that of the ups, which stand behind each other or in turn."""
    if is_concatenated:
        gates, ups = both.chunk(2, axis)
        return gates, ups
    parts = both.unflatten(axis, (-1, 2))
    return parts.select(axis + 1, 0), parts.select(axis + 1, 1)


def _laced(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up), -1).flatten(-2)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The experts of a model's layers that NativeExperts can stand for, by their names."""
    return ((name, one) for name, one in model.named_modules() if are_experts(one))


def pack_experts(model: Any, library: NativeLibrary, storage: WeightStorage) -> None:
    """Replace the experts of a model of any family by NativeExperts, layer by layer."""
    for name, stock in list(experts_of(model)):
        model.set_submodule(name, NativeExperts(stock, name, library, storage))
