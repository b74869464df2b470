"""Fit: whether a checkpoint fits in memory, at which precision, and what else would. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from medusa_chat.checkpoints.cpu import Cpu
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory_estimate import Estimate, estimate, is_rounded, runs_in_c
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.checkpoints.precision import QUANTISED, smaller_precisions
from medusa_chat.errors import ModelError
from medusa_chat.units import gb

NODES = 64
NO_PRODUCT = (  # of kernels/products.py
    "int8 only saves memory: without cuda-bindings its weights are unpacked in every step, slower "
    "than 16 bits"
)
SHORTEST = 512  # tokens of context that are still worth a try
SHARE = 0.95  # of free memory that weights and cache may take; the rest is for what comes and goes


@dataclass(frozen=True)
class MemoryNeeds:
    """What a checkpoint takes on one device. free: bytes there, None for unknown."""

    found: Checkpoint
    context: int
    device: str
    free: int | None
    cpu: Cpu = Cpu()

    def at(self, precision: str, context: int | None = None) -> Estimate | None:
        """The memory it takes; None for a config that the estimate cannot read."""
        try:
            parts = estimate(
                self.found.weights.config,
                self.found.heads,
                precision,
                context or self.context,
                NODES,
                self.device,
                self.cpu,
                self._kept,
                self.found.adapter is not None,
            )
        except ModelError:
            return None
        return replace(parts, device=0)  # what CUDA itself takes is not free any more

    @property
    def _kept(self) -> int:
        """Bytes of the matrices that our C code can keep as a GGUF file has them."""
        return 0 if self.found.adapter else self.found.weights.kept

    @property
    def multiplies_numbers(self) -> bool:
        """Whether our C code would multiply a GGUF file's own numbers, at bf16."""
        return self._kept > 0 and self.runs_in_c("bf16")

    def runs_in_c(self, precision: str) -> bool:
        """Whether our C code would decode it; False where the config is unknown."""
        try:
            size = sizes(self.found.weights.config)
        except ModelError:
            return False
        return self.device == "cpu" and runs_in_c(size, precision, self.cpu)

    def rounds(self, precision: str) -> bool:
        """Whether our C code would multiply its weights, rounded to this precision."""
        return self.device == "cpu" and is_rounded(precision, self.cpu)

    def widens(self, precision: str) -> bool:
        """Whether our C code would multiply weights of bf16 in fp32, which they stay in memory."""
        if precision != "fp32" or self.found.adapter is not None or not self.runs_in_c("fp32"):
            return False
        size = sizes(self.found.weights.config)
        return size.is_bf16 and self.found.weights.bytes < 3 * size.parameters  # as its files say

    def smaller(self, precision: str) -> tuple[str, ...]:
        """See smaller_precisions."""
        return smaller_precisions(precision, self.rounds("int8"))

    def fits(self, precision: str, context: int | None = None) -> bool:
        """Whether it fits; True where that is unknown."""
        parts = self.at(precision, context)
        return parts is None or self.free is None or parts.total <= SHARE * self.free

    def choose(self, preferred: str) -> str | None:
        """The first precision that fits: the preferred one, else a smaller one; None for none."""
        return next((p for p in (preferred, *self.smaller(preferred)) if self.fits(p)), None)

    def remarks(self, precision: str) -> tuple[str, ...]:
        """Notes on what a precision does to this model."""
        if precision not in QUANTISED or self.at(precision) is None:
            return ()
        notes: tuple[str, ...] = ()
        if precision == "int8" and self.device.startswith("cuda"):
            notes = () if find_spec("cuda") else (NO_PRODUCT,)
        size = 2 * sizes(self.found.weights.config).experts
        experts = f"the experts stay in 16 bits ({gb(size)}): they are not quantised"
        return (*notes, experts) if size else notes

    def advice(self, precision: str) -> str:
        """One line: that it does not fit at `precision`, and what would."""
        parts = self.at(precision)
        if parts is None or self.free is None:
            tries = [f"--precision {p}" for p in self.smaller(precision)[-1:]]
            tries += ["a smaller --max-context", "a smaller model"]
            return f"{self._start(precision)}: try {', '.join(tries[:-1])} or {tries[-1]}"
        needs = f"it needs {gb(parts.total)} and {gb(self.free)} are free"
        return f"{self._start(precision)} ({needs}): {self._remedy(precision)}"

    def _start(self, precision: str) -> str:
        return f"{self.found.name} does not fit on {self.device} at {precision}"

    def _remedy(self, precision: str) -> str:
        """Advice from the estimate on what would fit; if it says that this fits, it was too low."""
        if self.fits(precision):
            return "close other programs, or try a smaller --max-context or --precision nf4"
        for other in self.smaller(precision):
            if self.fits(other):
                return f"--precision {other} would fit ({_size(self.at(other))})"
        last = (precision, *self.smaller(precision))[-1]
        if (tokens := self._longest(last)) >= SHORTEST:
            option = f"--precision {last} " if last != precision else ""
            return f"{option}--max-context {tokens} would fit"
        return f"choose a smaller model: even {last} needs {_size(self.at(last))}"

    def _longest(self, precision: str) -> int:
        """Tokens of context that fit, in steps of SHORTEST; 0 for none."""
        tried: Sequence[int] = range(SHORTEST, self.context, SHORTEST)
        return max((n for n in tried if self.fits(precision, n)), default=0)


def _size(parts: Estimate | None) -> str:
    return gb(parts.total) if parts else "?"
