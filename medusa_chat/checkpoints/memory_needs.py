"""MemoryNeeds: what memory a model takes at each precision, and whether it fits. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from medusa_chat.checkpoints.layouts.folders import BackboneFiles
from medusa_chat.checkpoints.layouts.heads_file import HeadsFile
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.machine import PLAIN_CPU, Cpu
from medusa_chat.checkpoints.model_sizes import Sizes, sizes
from medusa_chat.decoding.settings import CPU_CHUNK, MAX_NODES
from medusa_chat.errors import ModelError
from medusa_chat.messages import DeviceMemory
from medusa_chat.units import gb

PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "nf4")  # what --precision takes
PLAIN_PRECISIONS = ("fp32", "bf16", "fp16")
QUANTISED = ("int8", "nf4")  # on a CPU by our C where there is a compiler, else by bitsandbytes
# What a process takes before any model, with the pages of libraries that a load touches: measured
# with torch 2.13 for CPUs; and its tokenizer, for each token (measured from 49,152 to 262,144).
PROGRAM = 385_000_000
TOKEN = 450
CUDA_CONTEXT = 700_000_000
# On CUDA, by what is known of the libraries and a replay of loads; not measured on a card.
RECORDED = 100_000_000  # ten recorded steps of 5 to 10 MB
WORKSPACES = 64_000_000  # of cuBLAS
# between the weights, of their bytes and for any model (tests/checkpoints/test_load_replay.py)
GAPS = {"fp32": 0.03, "bf16": 0.03, "fp16": 0.03, "int8": 0.05, "nf4": 0.05}
LEAST_GAPS = 100_000_000
# bytes of one weight of a linear; the LM head, embeddings, norms and heads stay in 16 bits.
# int8: a scale for each row; nf4 with double quantisation: a byte for 64 weights, 4 for 64 * 256
LINEAR = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "nf4": 0.5 + 1 / 64 + 4 / 16_384}
PLAIN = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 2, "nf4": 2}
WIDE = 1024  # outputs from which oneDNN lays a linear out anew in fp32
# what our C code makes of a linear's weight on a CPU: 32 numbers with a scale, and a floor
ROUNDED = {"int8": 1 + 2 / 32, "nf4": 0.5 + 4 / 32}
# part of a weight that a GPU unpacks at a time for a prompt: block_tiles.PIECE weights, with what
# torch makes on the way to 16 bits; not measured on a card
UNPACKED = 16 << 24
PIECES = 100_000_000  # what a load of a GGUF file gives back, measured with 98 MB to 1.1 GB
BLOCK = 64  # weights of nf4 that share a scale
# what a weight of nf4 takes more where its scale is in fp32 again
UNNESTED = 4 / BLOCK - 1 / BLOCK - 4 / 16_384


@dataclass(frozen=True)
class Estimate:
    """Bytes that a loaded model takes on its device, by part.

    weights: as they will lie in memory, second copies included; heads: the same of Medusa heads;
    cache: keys and values of the whole context; program: Python, torch and the tokenizer, on a GPU
    CUDA's own; step: what a step works in; gaps: what CUDA's allocator cannot give to anything
    else; loading: what a load gives back; mapped: files that are mapped while they are read, whose
    pages the system may take at any time.
    """

    weights: int
    heads: int
    cache: int
    program: int
    step: int
    gaps: int = 0
    loading: int = 0
    mapped: int = 0

    @property
    def held(self) -> int:
        """The bytes of tensors held from load to unload, which can be measured after loading."""
        return self.weights + self.heads + self.cache

    @property
    def total(self) -> int:
        """The one figure that is told of a model: what it takes at rest."""
        return self.held + self.program + self.step + self.gaps

    @property
    def peak(self) -> int:
        return self.total + max(self.loading, self.mapped)

    @property
    def words(self) -> str:
        """What every place says of a model's memory."""
        margin = self.program + self.step + self.gaps
        parts = f"weights {gb(self.weights + self.heads)}, KV cache {gb(self.cache)}"
        peak = f"; up to {gb(self.peak)} while loading" if self.peak > 1.1 * self.total else ""
        return f"{gb(self.total)}: {parts}, program and steps {gb(margin)}{peak}"

    def at_context(self, full: int, context: int) -> "Estimate":
        """An estimate made for `full` tokens, at `context` of them."""
        return replace(
            self, cache=self.cache * (min(context, full) + MAX_NODES) // (full + MAX_NODES)
        )

    def fits(self, free: int) -> bool:
        """Whether it fits beside a program that runs already. free: bytes."""
        return self.total - self.program + self.loading <= SHARE * free


def estimate(
    config: Mapping[str, Any],
    heads: HeadsFile | None,
    precision: str,
    context: int,
    nodes: int,
    device: str = "cuda",
    cpu: Cpu = PLAIN_CPU,
    is_adapted: bool = False,
) -> Estimate:
    """Memory for a context of `context` tokens and a tree of `nodes`. precision: fp32, bf16,
    fp16, int8 or nf4. is_adapted: whether an adapter changes its weights. Raises ModelError."""
    size, plain = sizes(config), PLAIN[precision]
    is_native = device == "cpu" and runs_in_c(size, precision, cpu)
    is_cuda, in_c = device.startswith("cuda"), device == "cpu" and is_rounded(precision, cpu)
    scales = 4 * size.linears // size.hidden if precision == "int8" and not in_c else 0
    if precision == "nf4" and size.is_merged and size.hidden % BLOCK == 0 and not in_c:
        scales = int(size.linears * UNNESTED)
    rows = 1 + (heads.heads if heads else 0)
    linear = (ROUNDED if in_c else LINEAR)[precision]
    rounded = size.linears + (size.experts if in_c else 0)
    weights = int(rounded * linear) + (size.parameters - rounded) * plain + scales
    twice = _packed(size, heads, precision, cpu) * plain if device == "cpu" else 0
    loading, words = 0, size.vocabulary * size.hidden
    if in_c:
        loading = (
            _read(size, not is_adapted) + 2 * size.experts
        )  # which are merged as they are read
        if is_native:  # the LM head has 8 bits; the table of a tied one stays as well
            table = int(words * ROUNDED["int8"])
            twice += table - words * plain if size.is_tied else 0
            weights += 0 if size.is_tied else table - words * plain
    if is_native and precision == "fp32" and size.is_bf16 and not is_adapted:
        short = 2 * (size.linears + size.experts)  # they lie in bf16
        short += 0 if size.is_tied else 2 * words
        weights, twice = weights - short, twice - (2 * words if size.is_tied else 0)
        loading = 3 * _read(size, True)  # one layer in bf16, and in fp32
        twice -= 2 * _inner(heads) if heads and heads.dtype == "BF16" else 0
    logits = 4 * nodes * size.vocabulary
    return Estimate(
        weights=weights + twice,
        heads=heads.parameters * plain if heads else 0,
        cache=2 * size.key_values * (context + MAX_NODES) * plain,
        program=CUDA_CONTEXT if is_cuda else PROGRAM + TOKEN * size.vocabulary,
        step=2 * logits * rows + RECORDED + WORKSPACES + _unpacked(size, precision)
        if is_cuda
        else logits + (CPU_CHUNK * size.row * 4 if is_native else 0),
        gaps=int(weights * GAPS[precision]) + LEAST_GAPS if is_cuda else 0,
        loading=loading,
        mapped=0 if is_cuda else 2 * size.parameters,
    )


def estimate_file(
    files: BackboneFiles,
    heads: HeadsFile | None,
    context: int,
    nodes: int,
    device: str = "cpu",
    cpu: Cpu = PLAIN_CPU,
) -> Estimate:
    """The same of a GGUF file that is used as it is. Raises ModelError."""
    size = sizes(files.config)
    if device != "cpu":
        return _estimate_stored(files, size, heads, context, nodes, device)
    is_twice = size.is_tied and not files.table  # floats lie as the table and as the LM head
    table = 2 * size.vocabulary * size.hidden if is_twice else 0
    is_native = runs_in_c(size, "bf16", cpu)
    beside = (2 if size.experts else 1) * MAX_NODES  # see Backbone: its lone rows run twice
    return Estimate(
        weights=files.packed + files.stacked[0] + 2 * files.wide + table,
        heads=2 * heads.parameters if heads else 0,
        cache=2 * 2 * size.key_values * (context + beside),
        program=PROGRAM + TOKEN * size.vocabulary,
        step=4 * nodes * size.vocabulary + (CPU_CHUNK * size.row * 4 if is_native else 0),
        loading=PIECES,
    )


def _estimate_stored(
    files: BackboneFiles,
    size: Sizes,
    heads: HeadsFile | None,
    context: int,
    nodes: int,
    device: str,
) -> Estimate:
    """On a GPU: the embedding stays packed as well, and experts are unpacked."""
    is_cuda = device.startswith("cuda")
    weights = files.packed + 2 * (files.wide + files.stacked[1])
    logits = 4 * nodes * size.vocabulary * (1 + (heads.heads if heads else 0))
    return Estimate(
        weights=weights,
        heads=2 * heads.parameters if heads else 0,
        cache=2 * 2 * size.key_values * (context + MAX_NODES),
        program=CUDA_CONTEXT if is_cuda else PROGRAM + TOKEN * size.vocabulary,
        step=2 * logits + UNPACKED + (RECORDED + WORKSPACES if is_cuda else 0),
        gaps=int(weights * GAPS["bf16"]) + LEAST_GAPS if is_cuda else 0,
        loading=PIECES,
    )


def estimates(
    files: BackboneFiles,
    heads: HeadsFile | None,
    context: int,
    nodes: int,
    device: str = "cuda",
    cpu: Cpu = PLAIN_CPU,
    is_adapted: bool = False,
) -> dict[str, Estimate]:
    """The memory at every precision that a load can take: of a GGUF file first as it is, under the
    name of its types, and then unpacked; it is never rounded again. Raises ModelError."""
    found = {
        precision: estimate(files.config, heads, precision, context, nodes, device, cpu, is_adapted)
        for precision in (*PLAIN_PRECISIONS, *(() if files.stored else QUANTISED))
    }
    if not files.stored:
        return found
    unpacked = {precision: replace(parts, mapped=0) for precision, parts in found.items()}
    if not is_used_as_it_is(files, device, cpu, is_adapted):
        return unpacked
    return {files.stored: estimate_file(files, heads, context, nodes, device, cpu), **unpacked}


def is_used_as_it_is(files: BackboneFiles, device: str, cpu: Cpu, is_adapted: bool) -> bool:
    """Whether the blocks of a GGUF file stay as they are: by our C on a CPU, on a GPU always."""
    if device == "cpu":
        return files.packed + files.stacked[0] > 0 and cpu.has_compiler and not is_adapted
    return files.packed > 0 and not is_adapted


def _read(size: Sizes, is_mapped: bool) -> int:
    """Bytes of bf16 that a load holds at a time of what it packs: of one layer where files are
    mapped into memory as they are, else of all."""
    return 2 * size.linears // (size.layers if is_mapped else 1)


def _unpacked(size: Sizes, precision: str) -> int:
    """Bytes of the widest linear of a layer in 16 bits, to which one of 4 or 8 bits is unpacked for
    a product of many rows; recorded steps may keep that buffer."""
    layers = size.copied[1:]
    widest = max((rows * columns for rows, columns, _ in layers), default=0)
    return 2 * widest if precision in ("int8", "nf4") else 0


def _packed(size: Sizes, heads: HeadsFile | None, precision: str, cpu: Cpu) -> int:
    """Weights that a CPU keeps twice: where our C code decodes heads and tied embeddings; else in
    fp32 of wide linears, in bf16 all where it has AMX; of a quantised model the LM head."""
    if runs_in_c(size, precision, cpu):
        return _inner(heads) + (size.vocabulary * size.hidden if size.is_tied else 0)
    if precision != "fp32" and not (cpu.has_amx and precision != "fp16"):
        return 0
    copied = size.copied[:1] if precision in ("int8", "nf4") else size.copied
    least = WIDE if precision == "fp32" else 1
    return sum(rows * columns * count for rows, columns, count in copied if rows >= least)


def _inner(heads: HeadsFile | None) -> int:
    """Weights of the heads' own layers."""
    return heads.heads * heads.layers * heads.hidden**2 if heads else 0


def runs_in_c(size: Sizes, precision: str, cpu: Cpu) -> bool:
    """Whether a model of this size will be decoded by our C code on a CPU, as far as its config
    tells (native_step.can_run sees the model)."""
    return cpu.has_compiler and precision != "fp16" and size.is_reached


def is_rounded(precision: str, cpu: Cpu) -> bool:
    """Whether our C code multiplies what is quantised to this precision on a CPU."""
    return cpu.has_compiler and precision in ROUNDED


NODES = 64
NO_PRODUCT = (  # of kernels/products.py
    "int8 only saves memory: its weights are unpacked in every step, slower than 16 bits; our "
    "product needs a card of compute capability 8.0 and cuda-bindings"
)
SHORTEST = 512  # tokens of context that are still worth a try
SHARE = 0.95  # of free memory that weights and cache may take; the rest is for what comes and goes


# What was measured of a precision, named as such (docs/benchmarks.md; the notes, "On a GPU" and "8
# and 4 bits on a CPU"). KL: from fp32, on the demo, of weights rounded as this kind of device has
# them; steps of a 7B shape behind 1,000 tokens.
MEASURED = {
    ("cuda", "int8"): "a 7B's plain step 2.8 ms on an H200, 4.5 in fp16; KL 0.00006 nats",
    ("cuda", "nf4"): "a 7B's plain step 2.5 ms on an H200, 4.5 in fp16; KL 0.0112 nats",
    ("cpu", "int8"): "SmolLM2 1.4 times as fast as in fp32 on 2 cores; KL 0.00007 nats",
    ("cpu", "nf4"): "SmolLM2 1.6 times as fast as in fp32 on 2 cores; KL 0.0074 nats",
}


def measured(precision: str, device: str, has_int8: bool) -> str:
    """What was measured of a precision on such a device, in words; empty where nothing was. device:
    torch's name. has_int8: whether our own product multiplies int8 there, as in what was measured.
    """
    kind = device.partition(":")[0]
    words = MEASURED.get((kind, precision), "")
    return f"measured: {words}" if words and (has_int8 or precision != "int8") else ""


def smaller_precisions(precision: str, has_int8: bool = False) -> tuple[str, ...]:
    """The precisions that a load may fall back to because they take less memory, the largest first.
    has_int8: whether a product of ours multiplies int8, the C or the CUDA one; without one it
    only saves memory, half as much as nf4 and with a longer step, so it is none of them."""
    falling = ("fp32", "bf16", "int8", "nf4") if has_int8 else ("fp32", "bf16", "nf4")
    if precision not in PRECISIONS:  # a GGUF file as it is
        return ()
    alike = "bf16" if precision in ("fp16", *(() if has_int8 else ("int8",))) else precision
    return falling[falling.index(alike) + 1 :]


def automatic_precision(
    memory: Mapping[str, Estimate], machine: DeviceMemory, cpu: Cpu, stored: str = ""
) -> str:
    """The precision that a load takes at "auto", of those in `memory`; empty where none fits.
    stored: what the types of a GGUF file are called."""
    tried: tuple[str, ...] = (stored,) if stored in memory else ()
    if not tried and machine.precision:
        tried = (machine.precision, *smaller_precisions(machine.precision, has_int8(machine, cpu)))
    return next((p for p in tried if p in memory and memory[p].fits(machine.free)), "")


def has_int8(machine: DeviceMemory, cpu: Cpu) -> bool:
    """Whether a product of ours multiplies int8 on a device."""
    return is_rounded("int8", cpu) if machine.device == "cpu" else machine.has_int8


@dataclass(frozen=True)
class MemoryNeeds:
    """What a checkpoint takes on one device. free: bytes there, None for unknown. has_int8: whether
    our CUDA product multiplies int8 there."""

    found: Checkpoint
    context: int
    device: str
    free: int | None
    cpu: Cpu = Cpu()
    has_int8: bool = False

    def at(self, precision: str, context: int | None = None) -> Estimate | None:
        """The memory it takes; None for a config that the estimate cannot read."""
        found, tokens = self.found, context or self.context
        is_adapted = found.adapter is not None
        try:
            if precision == found.weights.stored:
                return estimate_file(
                    found.weights, found.heads, tokens, NODES, self.device, self.cpu
                )
            parts = estimate(
                found.weights.config,
                found.heads,
                precision,
                tokens,
                NODES,
                self.device,
                self.cpu,
                is_adapted,
            )
        except ModelError:
            return None
        return replace(parts, mapped=0) if found.weights.stored else parts

    @property
    def is_used_as_it_is(self) -> bool:
        """Whether our C code would multiply the blocks of the checkpoint's GGUF file."""
        is_adapted = self.found.adapter is not None
        return is_used_as_it_is(self.found.weights, self.device, self.cpu, is_adapted)

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
        if precision != "fp32" or self.found.adapter is not None or self.found.weights.stored:
            return False
        if not self.runs_in_c("fp32"):
            return False
        size = sizes(self.found.weights.config)
        return size.is_bf16 and self.found.weights.bytes < 3 * size.parameters  # as its files say

    def smaller(self, precision: str) -> tuple[str, ...]:
        """See smaller_precisions; none of a GGUF file, which is never rounded again."""
        if self.found.weights.stored:
            return ()
        return smaller_precisions(precision, self.has_int8 or self.rounds("int8"))

    def measured(self, precision: str) -> str:
        """See measured."""
        return measured(precision, self.device, self.has_int8 or self.rounds("int8"))

    def fits(self, precision: str, context: int | None = None) -> bool:
        """Whether it fits; True where that is unknown."""
        parts = self.at(precision, context)
        return parts is None or self.free is None or parts.fits(self.free)

    def choose(self, preferred: str) -> str | None:
        """The first precision that fits: the preferred one, else a smaller one; None for none."""
        return next((p for p in (preferred, *self.smaller(preferred)) if self.fits(p)), None)

    def remarks(self, precision: str) -> tuple[str, ...]:
        """Notes on what a precision does to this model."""
        if precision not in QUANTISED or self.at(precision) is None:
            return ()
        notes: tuple[str, ...] = ()
        if precision == "int8" and self.device.startswith("cuda"):
            notes = () if self.has_int8 else (NO_PRODUCT,)
        size = 2 * sizes(self.found.weights.config).experts
        experts = f"the experts stay in 16 bits ({gb(size)}): they are not quantised"
        return (*notes, experts) if size and not self.rounds(precision) else notes

    def advice(self, precision: str) -> str:
        """One line: that it does not fit at `precision`, and what would."""
        parts = self.at(precision)
        if parts is None or self.free is None:
            tries = [f"--precision {p}" for p in self.smaller(precision)[-1:]]
            tries += ["a smaller --max-context", "a smaller model"]
            return f"{self._start(precision)}: try {', '.join(tries[:-1])} or {tries[-1]}"
        room = self.free + parts.program  # which is there already
        needs = f"it takes {gb(parts.total)}, and there is room for {gb(room)}"
        return f"{self._start(precision)} ({needs}): {self._remedy(precision)}"

    def _start(self, precision: str) -> str:
        return f"{self.found.name} does not fit on {self.device} at {precision}"

    def _remedy(self, precision: str) -> str:
        """Advice from the estimate on what would fit; if it says that this fits, it was too low."""
        if self.fits(precision):
            smaller = "" if self.found.weights.stored else " or --precision nf4"
            return f"close other programs, or try a smaller --max-context{smaller}"
        if self.is_used_as_it_is and precision != self.found.weights.stored:
            parts = self.at(self.found.weights.stored)
            if parts is not None and self.free is not None and parts.fits(self.free):
                return f"--precision auto, the file as it is, would fit ({_size(parts)})"
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
