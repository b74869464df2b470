"""Packing: the matrices of a GGUF file, packed by a thread while a process imports transformers.

That import takes seconds of one core, and packing as long again of the others. The load then takes
what is packed, waits for what is being packed, and packs the rest as ever.
"""

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Thread

import psutil
from torch import Tensor

from medusa_chat.checkpoints import devices, native_build
from medusa_chat.checkpoints.gguf_rows import FileRows
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.machine import this_cpu
from medusa_chat.checkpoints.memory_needs import MemoryNeeds
from medusa_chat.decoding.backends.native_library import NativeLibrary, Weights
from medusa_chat.decoding.backends.native_weights import UnreadRows, pack_rows
from medusa_chat.decoding.families import NATIVE_FAMILIES
from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import LoadRequest

USUAL = 8192  # tokens of context, to guess whether a model fits
PARTED = ("qkv_proj", "gate_up_proj")  # which a load packs in parts
SWITCH = 5e-4  # seconds that a thread waits for an importing one, a tenth of Python's own


class Packing:
    """The matrices of a file, in its order, packed by a thread that begins at once."""

    def __init__(self, weights: GgufWeights, library: NativeLibrary) -> None:
        self.weights, self._library, self._rows = weights, library, FileRows(weights)
        names = (name for name in weights.places if self._rows.is_in_blocks(name))
        self._left = dict.fromkeys(n for n in names if not any(part in n for part in PARTED))
        self._packed: dict[str, tuple[Weights, Tensor] | None] = {}
        self._now, self._changed = "", Condition()
        self._thread = Thread(target=self._run, name="packing", daemon=True)
        atexit.register(self.stop)  # a thread ended inside of C++ would take all along
        self._thread.start()

    def take(self, name: str) -> tuple[Weights, Tensor] | None:
        """A matrix as pack_rows gives it, which the caller then owns; None where the caller has to
        pack it: nobody else will."""
        with self._changed:
            self._left.pop(name, None)
            self._changed.wait_for(lambda: self._now != name)
            return self._packed.pop(name, None)

    def stop(self) -> None:
        """End the thread, and free what nobody took."""
        with self._changed:
            self._left.clear()
        self._thread.join()
        self._packed.clear()
        atexit.unregister(self.stop)

    def _run(self) -> None:
        with _often_switched():
            while name := self._next():
                found = None
                with suppress(Exception):  # the load does it again, and reports it
                    rows = self._rows.rows(name)
                    if isinstance(rows, UnreadRows):
                        found = pack_rows(rows.pieces(), rows.outs, self._library)
                with self._changed:
                    self._packed[name], self._now = found, ""
                    self._changed.notify_all()

    def _next(self) -> str:
        """Take over the next matrix; empty for none."""
        with self._changed:
            self._now = next(iter(self._left), "")
            self._left.pop(self._now, None)
            return self._now


@contextmanager
def _often_switched() -> Iterator[None]:
    """What waits for the interpreter after each call of C waits shorter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def begun(request: LoadRequest) -> Packing | None:
    """The packing of what a load will want packed: a GGUF file on this disk whose whole decoder is
    C, as it is, on a CPU, where it fits. None for anything else, and for what a load will refuse.
    """
    if request.precision != "auto":
        return None
    with suppress(MedusaChatError, OSError):
        found = Checkpoint.find(request)
        free = psutil.virtual_memory().available
        needs = MemoryNeeds(found, request.max_context or USUAL, "cpu", free, this_cpu())
        stored = found.weights.stored
        is_wanted = bool(stored) and needs.is_used_as_it_is and needs.fits(stored)
        is_ours = found.weights.config.get("model_type") in NATIVE_FAMILIES
        if is_wanted and is_ours and devices.choose_device(request.device).type == "cpu":
            library = native_build.library()
            if library is not None:
                threads = max(1, devices.most_threads() - 1)  # the import takes one
                return Packing(GgufWeights.of(found), NativeLibrary(library, threads))
    return None
