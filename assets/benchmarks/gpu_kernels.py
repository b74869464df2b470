"""The parts of gpu.py about our kernels and recorded steps: whether they agree with their twins."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu_answers import events_of, parted_at, prompt_of
from gpu_clock import timed
from gpu_part import Bench
from torch import Tensor

from medusa_chat.bench.harness.random_model import RandomModel, load_shape
from medusa_chat.decoding.attention import tree_attention
from medusa_chat.decoding.backends import nf4, split_attention
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.backends.torch_step import TorchStep
from medusa_chat.decoding.engine import Engine
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.auto_tree import source_tree

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WIDTHS = (64, 128)
CALLS = ((1, 1, 40), (4, 16, 700), (2, 64, 1300), (1, 64, 1300))  # groups, rows, keys
SMALL = RandomModel("small", 512, 1376, 4, 8, 4, 4096, 4096)
TINY = RandomModel("tiny", 64, 128, 2, 4, 2, 96, 256, heads=3)
PROMPT = 200  # tokens
NONE = "no kernel runs here: torch computes in its place"


def parity(bench: Bench) -> Iterator[tuple[str, Any]]:
    """The largest difference of split attention from attention in fp32, by width of a head and
    number format, and of our NF4 product from its twin."""
    device = torch.device(bench.device)
    is_there = split_attention.has_kernel(device)
    yield "split attention", "our kernel" if is_there else NONE
    for width in WIDTHS:
        for name, dtype in FORMATS.items():
            off = _said(partial(_split_difference, device, width, dtype))
            yield f"split attention, D = {width}, {name}", off
    for name, dtype in FORMATS.items():
        off = _said(partial(nf4.difference, device, dtype)) if device.type == "cuda" else NONE
        yield f"nf4 product, {name}", off


def _said(work: Callable[[], float]) -> float | str:
    """What `work` returns, or the first line of its error: other formats may do."""
    try:
        return work()
    except Exception as error:
        return f"failed: {str(error).strip().partition(chr(10))[0]}"


def _split_difference(device: torch.device, width: int, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(0)
    worst = 0.0
    for groups, rows, keys in CALLS:
        shapes = ((2 * groups, rows), (2, keys), (2, keys))
        draws = (
            torch.randn(1, *shape, width, generator=generator, device=device) for shape in shapes
        )
        query, key, value = (t.to(dtype) for t in draws)
        mask = torch.zeros(1, 1, rows, keys, device=device)
        mask[..., keys - rows :] = torch.full((rows, rows), -torch.inf, device=device).triu(1)
        wide = (t.float().repeat_interleave(groups, 1) for t in (key, value))
        wanted = _in_fp32(query.float(), *wide, mask)
        ours = split_attention.split_tree_attention(query, key, value, mask.to(dtype))
        worst = max(worst, float((ours.float() - wanted).abs().max()))
    return worst


def _in_fp32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """[1, H, q, D] over [1, H, s, D] -> [1, q, H, D]."""
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5 + mask
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


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
                yield name, parted_at(recorded, by_operators)


def answer(engine: Engine, nodes: int, temperature: float, count: int) -> Sequence[int]:
    """Tokens of an answer to a made-up prompt."""
    prompt = prompt_of(engine, min(PROMPT, engine.backbone.context // 2))
    tree = source_tree(None, len(engine.heads or ())).head(nodes)
    engine.forget()
    return events_of(engine, prompt, tree, count, temperature)[-1].token_ids


def attention_times(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Milliseconds of one 64-row call at Llama-3.1-8B's sizes: plain and split."""
    heads, key_heads, width = bench.either((32, 8, 128), (4, 2, 16))
    device, dtype = bench.device, bench.either(torch.bfloat16, torch.float32)
    ways = {"plain": tree_attention, "split": split_attention.split_tree_attention}
    for keys in (1024, 8192, 32768):
        query = torch.randn(1, heads, 64, width, device=device, dtype=dtype)
        key = torch.randn(1, key_heads, keys, width, device=device, dtype=dtype)
        mask = torch.zeros(1, 1, 64, keys, device=device, dtype=dtype)
        for name, way in ways.items():
            call = partial(way, query, key, key, mask, 0.1)
            yield f"{name}, {keys} keys", timed(device, call, bench.either(30, 1))
