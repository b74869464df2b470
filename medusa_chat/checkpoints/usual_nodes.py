"""How many nodes the auto tree has before step times were measured: on a GPU by its roofline."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from medusa_chat.checkpoints.gpus import Gpu, beside_seconds, gpu_of
from medusa_chat.checkpoints.machine import this_cpu
from medusa_chat.checkpoints.memory_needs import LINEAR, PLAIN, QUANTISED
from medusa_chat.checkpoints.model_sizes import Sizes, sizes
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.errors import ModelError
from medusa_chat.trees.pick import pick

MODELLED = (1, 4, 8, 16, 32, 64)  # nodes
LEAST = 4  # also where plain decoding looks faster: a second later the tuner has measured
CAUTIOUS = 16  # where the device or the model is not known well enough


def usual_nodes(
    device: torch.device,
    precision: str,
    is_native: bool,
    config: Mapping[str, Any],
    expected: Sequence[float],
    head_parameters: int,
    is_packed: bool = False,
) -> tuple[int, str]:
    """Nodes of the auto tree, and the reason as the end of a sentence.

    On a CPU few in fp32 and in C, where each row costs its whole computation, and twice as many
    where AMX multiplies rows of bf16, which it does not where a GGUF file's numbers are multiplied
    (is_packed). On a GPU those with the most tokens a second, by the time that weights and products
    take of a step. config: the backbone's. expected[m - 1]: tokens a step with m nodes.
    head_parameters: of the Medusa heads."""
    if device.type == "cpu":
        is_half = precision in ("bf16", "fp16")
        dear = 8 if is_half and this_cpu().has_amx and not is_packed else 4
        return (16 if is_half and not is_native else dear), "for cpu"
    gpu = gpu_of(torch.cuda.get_device_properties(device)) if device.type == "cuda" else None
    try:
        size = sizes(config)
    except ModelError:
        gpu = None
    if gpu is None or size.experts:  # a tree's rows go to more experts than one row
        return CAUTIOUS, f"for {device.type}, a default until step times are measured"
    seconds = tuple(_seconds(gpu, size, precision, m, head_parameters) for m in MODELLED)
    best = pick(StepCosts(MODELLED, (1,), (seconds,)), expected, 1)
    return max(LEAST, best.nodes), f"modelled from the bandwidth and compute of {gpu.name}"


def _seconds(gpu: Gpu, size: Sizes, precision: str, nodes: int, head_parameters: int) -> float:
    """A step of `nodes` nodes by the roofline; attention, which depends on the text, left out."""
    plain = PLAIN[precision]
    linears = gpu.seconds(2.0 * size.linears * nodes, LINEAR[precision] * size.linears)
    if precision in QUANTISED:
        linears = max(linears, gpu.decoding_seconds(size.linears, nodes))
    words = size.vocabulary * size.hidden
    step = linears + gpu.seconds(2.0 * words * nodes, plain * words)
    if nodes > 1:  # heads without an LM head of their own read the backbone's
        read = head_parameters if head_parameters > words else head_parameters + words
        step += gpu.seconds(2.0 * read, plain * read)
    return step + beside_seconds(size.layers, nodes)
