"""step_prior(): what steps should cost before any was seen, by the roofline of the device."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from medusa_chat.checkpoints.gpus import Gpu, beside_seconds, gpu_of
from medusa_chat.checkpoints.machine import this_cpu
from medusa_chat.checkpoints.memory_needs import LINEAR, PLAIN, QUANTISED
from medusa_chat.checkpoints.model_sizes import Sizes, sizes
from medusa_chat.decoding.budget import StepTimes
from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.errors import ModelError

CPU_NODES = 80  # of the largest step that is priced on a CPU
# arithmetic of a row over the reading of the weights: on a CPU, with its tiles, elsewhere
CPU_ROW, TILE_ROW, OTHER_ROW = 0.25, 0.08, 0.05
DRAFT = 0.15  # the heads' time in plain steps where it is not modelled


def step_prior(
    device: torch.device,
    precision: str,
    is_native: bool,
    config: Mapping[str, Any],
    head_parameters: int,
    is_packed: bool = False,
    tries: int = 0,
) -> StepTimes:
    """The times of a model's steps as they begin. On a CPU a row costs a quarter of what reading
    the weights does, less where AMX multiplies rows of bf16, which it does not where a GGUF file's
    numbers are multiplied (is_packed), or where torch's operators cost more than either; rows of a
    mixture read more experts than one row. config: the backbone's. head_parameters: of the Medusa
    heads. tries: see StepBackend."""
    if device.type == "cpu":
        is_half = precision in ("bf16", "fp16")
        has_tiles = this_cpu().has_amx and not is_packed
        row = TILE_ROW if is_half and (has_tiles or not is_native) else CPU_ROW
        return StepTimes(_smooth(row, CPU_NODES, _reads(config)), DRAFT, tries)
    gpu = gpu_of(torch.cuda.get_device_properties(device)) if device.type == "cuda" else None
    try:
        size = sizes(config)
    except ModelError:
        gpu = None
    if gpu is None or size.experts:  # a tree's rows go to more experts than one row
        return StepTimes(_smooth(OTHER_ROW, MAX_NODES), DRAFT, tries)
    if precision not in PLAIN:  # the types of a GGUF file, most of which has 4 to 6 bits
        precision = "nf4"
    seconds = [_seconds(gpu, size, precision, n) for n in range(1, MAX_NODES + 1)]
    draft = _draft_seconds(gpu, size, precision, head_parameters)
    return StepTimes([max(1.0, s / seconds[0]) for s in seconds], draft / seconds[0], tries)


def _smooth(row: float, most: int, read: Callable[[int], float] = lambda rows: 1.0) -> list[float]:
    """Costs that are flat while reading takes longer and rise with the rows from there on. read:
    what a step of so many rows reads, in plain steps."""
    values = [(read(n) ** 3 + (row * n) ** 3) ** (1 / 3) for n in range(1, most + 1)]
    return [value / values[0] for value in values]


def _reads(config: Mapping[str, Any]) -> Callable[[int], float]:
    """The weights that a step of so many rows reads, in those of a plain one: of a mixture the
    experts that at least one row chooses, as if each chose for itself."""
    try:
        size = sizes(config)
    except ModelError:
        return lambda rows: 1.0
    always = size.linears + size.vocabulary * size.hidden

    def weights(rows: int) -> float:
        return always + size.experts * (1 - (1 - size.chosen) ** rows)

    return lambda rows: weights(rows) / weights(1)


def _seconds(gpu: Gpu, size: Sizes, precision: str, nodes: int) -> float:
    """A step of `nodes` nodes by the roofline; attention, which depends on the text, left out."""
    plain = PLAIN[precision]
    linears = gpu.seconds(2.0 * size.linears * nodes, LINEAR[precision] * size.linears)
    if precision in QUANTISED:
        linears = max(linears, gpu.decoding_seconds(size.linears, nodes))
    words = size.vocabulary * size.hidden
    step = linears + gpu.seconds(2.0 * words * nodes, plain * words)
    return step + beside_seconds(size.layers, nodes)


def _draft_seconds(gpu: Gpu, size: Sizes, precision: str, parameters: int) -> float:
    """The heads' time; those without an LM head of their own read the backbone's."""
    words = size.vocabulary * size.hidden
    read = parameters if parameters > words else parameters + words
    return gpu.seconds(2.0 * read, PLAIN[precision] * read) if parameters else 0.0
