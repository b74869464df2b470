"""The parts of gpu.py about our kernels and recorded steps: whether they agree with their twins."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu_answers import events_of, prompt_of
from gpu_part import Bench

from medusa_chat.bench.answers import parting
from medusa_chat.bench.random_model import RandomModel, load_shape
from medusa_chat.decoding.backends import fused_kernels, quantised, split_attention
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.step import TorchStep
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.auto_tree import source_tree

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WIDTHS = (128, 64, 256)
SMALL = RandomModel("small", 512, 1376, 4, 8, 4, 4096, 4096)
SIZES = fused_kernels.Sizes(128_256, 4096, (32, 8), 128, 14336)  # of Llama-3.1-8B
TINY = RandomModel("tiny", 64, 128, 2, 4, 2, 96, 256, heads=3)
PROMPT = 200  # tokens
NONE = "no kernel runs here: torch computes in its place"


def parity(bench: Bench, name: str) -> Iterator[tuple[str, Any]]:
    """The largest difference of our kernels from their twins in fp32, in one number format: of the
    kernels of an 8B's layer (and of its logits, with fp32), of split attention by width of a head,
    of the products with quantised weights."""
    device, dtype = torch.device(bench.device), FORMATS[name]

    def of(difference: Callable[..., float], *asked: Any) -> float | str:
        return _said(partial(difference, *asked)) if device.type == "cuda" else NONE

    own = fused_kernels.IN_LAYERS
    for kernel, what in (fused_kernels.NAMES if dtype == torch.float32 else own).items():
        yield what, of(fused_kernels.difference, kernel, SIZES, device, dtype)
    for width in WIDTHS:
        yield f"split attention, D = {width}", of(split_attention.difference, device, dtype, width)
    if dtype != torch.float32:  # it has no kernel
        for bits in (4, 8):
            yield f"{bits}-bit product", of(quantised.difference, device, dtype, bits)


def _said(work: Callable[[], float]) -> float | str:
    """What `work` returns, or its error, which is printed whole: other formats may do."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def recorded_parity(bench: Bench) -> Iterator[tuple[str, Any]]:
    """What a load says of its steps, and recorded answers against those of operators: the first
    place where tokens differ (None: nowhere)."""
    shape, count = bench.either((SMALL, 200), (TINY, 16))
    for precision in FORMATS:
        torch.manual_seed(0)
        loaded = load_shape(shape, LoadRequest(device=bench.device, precision=precision))
        backbone, heads = loaded.engine.backbone, loaded.engine.heads
        yield f"{precision}, at the load", loaded.info.notes[-1]
        for nodes in (1, 16, 64):
            for temperature in (0.0, 0.8):
                by_operators, recorded = (
                    answer(Engine(way(backbone), heads), nodes, temperature, count)
                    for way in (TorchStep, CudaGraphStep)
                )
                name = f"{precision}, {nodes} nodes, temperature {temperature}: first difference"
                yield name, parting(recorded, by_operators)


def answer(engine: Engine, nodes: int, temperature: float, count: int) -> Sequence[int]:
    """Tokens of an answer to a made-up prompt."""
    prompt = prompt_of(engine, min(PROMPT, engine.backbone.context // 2))
    tree = source_tree(None, len(engine.heads or ())).head(nodes)
    engine.forget()
    return events_of(engine, prompt, tree, count, temperature)[-1].token_ids
