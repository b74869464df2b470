"""On a CUDA machine: `python assets/benchmarks/gpu.py > result.json`, under ten minutes.

Parity of the split-attention kernel, of recorded steps, of our 4-bit product and of merged 4-bit
layers; how often Medusa in bf16 parts from plain decoding, with steady rows and without. Then
times: 4-bit products and steps of a 7B shape, the bench of a 7B and an 8B shape with random
weights, in bf16; no download. Each part is told apart and may fail alone; a part that begins too
late is shown as not run. This file was written without a GPU at hand: it has never been run on one.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import gpu_divergence
import gpu_nf4
import torch

from medusa_chat.bench import run_shape
from medusa_chat.bench.harness.random_model import SHAPES, RandomModel, load_shape
from medusa_chat.checkpoints.memory import release
from medusa_chat.decoding.backends import split_attention
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.backends.torch_step import TorchStep
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step_profiler import StepProfiler
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.auto_tree import source_tree

CUDA = torch.device("cuda")
BUDGET = 540.0  # seconds for everything
SMALL = RandomModel("small", 512, 1376, 4, 8, 4, 4096, 4096)
PROMPT = [(7 * i + 3) % 4096 for i in range(200)]
BEHIND = 900  # tokens
WARM_UPS, TIMED = 5, 30
STUDIES = ("steps", "bandwidth", "context")


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def kernel() -> dict[str, Any]:
    """Largest difference of the kernel from its twin, by number format."""
    device = torch.device("cuda")
    formats = (torch.float16, torch.bfloat16, torch.float32)
    return {str(f): split_attention.difference(device, f) for f in formats}


def attention_times() -> dict[str, Any]:
    """Milliseconds of one 64-row call at Llama-3.1-8B's sizes: plain and split."""
    from medusa_chat.decoding.attention import tree_attention

    found = {}
    for keys in (1024, 8192, 32768):
        query = torch.randn(1, 32, 64, 128, device="cuda", dtype=torch.bfloat16)
        key = torch.randn(1, 8, keys, 128, device="cuda", dtype=torch.bfloat16)
        mask = torch.zeros(1, 1, 64, keys, device="cuda", dtype=torch.bfloat16)
        for name, function in (
            ("plain", tree_attention),
            ("split", split_attention.split_tree_attention),
        ):
            found[f"{name}, {keys} keys"] = timed(
                lambda f=function, k=key, q=query, m=mask: f(q, k, k, m, 0.1)
            )
    return found


def timed(call: Callable[[], Any], repeats: int = TIMED) -> float:
    """Median milliseconds of a call, by the device's own clock."""
    for _ in range(WARM_UPS):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return sorted(a.elapsed_time(b) for a, b in pairs)[repeats // 2]


def cold(call: Callable[[], Any], repeats: int = 15) -> float:
    """Median milliseconds of a call whose weights lie in no cache, as in a step: a buffer larger
    than any is written before, which also hides what the host takes to launch it."""
    buffer = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    spans = []
    for _ in range(repeats + 3):
        marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        buffer.zero_()
        marks[0].record()
        call()
        marks[1].record()
        spans.append(marks)
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in spans[3:])[repeats // 2]


def recorded_parity() -> dict[str, Any]:
    """What the trial at a load says, and recorded answers against those of their parts: the first
    place where tokens differ (None: nowhere), in fp32 and bf16."""
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        loaded = load_shape(SMALL, LoadRequest(device="cuda", precision=precision))
        backbone, heads = loaded.engine.backbone, loaded.engine.heads
        found[f"{precision}, at the load"] = loaded.info.notes[-1]
        for nodes in (1, 16, 64):
            for temperature in (0.0, 0.8):
                parts, recorded = (
                    answer(Engine(way(backbone), heads), nodes, temperature)
                    for way in (TorchStep, CudaGraphStep)
                )
                name = f"{precision}, {nodes} nodes, temperature {temperature}: first difference"
                found[name] = gpu_nf4.first_difference(recorded, parts)
    return found


def answer(engine: Engine, nodes: int, temperature: float, count: int = 200) -> list[int]:
    """Tokens of an answer to PROMPT."""
    engine.forget()
    tree = source_tree(None, len(engine.heads or ())).head(nodes)
    drafter = "medusa" if nodes > 1 else "none"
    settings = GenerationSettings(
        drafter=drafter, temperature=temperature, max_new_tokens=count, seed=0
    )
    *_, last = engine.generate(PROMPT, engine.drafter(settings, tree), settings)
    return list(last.token_ids)


def recorded_times(name: str) -> dict[str, Any]:
    """`step_times` of a shape in bf16."""
    return step_times(load_shape(SHAPES[name], LoadRequest(device="cuda", precision="bf16")).engine)


def step_times(engine: Engine) -> dict[str, Any]:
    """Milliseconds of a step by nodes, behind BEHIND tokens: by operators, recorded, what of that
    is the device's, and in an answer, where the next one is queued ahead."""
    found: dict[str, Any] = {}
    source, backbone = source_tree(None, len(engine.heads or ())), engine.backbone
    recorded = CudaGraphStep(backbone)
    engines = {
        "by operators": Engine(TorchStep(backbone), engine.heads),
        "recorded": Engine(recorded, engine.heads),
    }
    for nodes in (1, 8, 16, 32, 64):
        at = min(BEHIND, backbone.context // 2)
        for name, way in engines.items():
            stage = StepProfiler(way, source)
            backbone.cache.fill(at)
            stage.try_out(nodes, at)
            before, label = recorded.seconds, f"{name}, {nodes} nodes"
            found[label] = timed(lambda n=nodes, s=stage, at=at: s.step(n, at))
            if way.backend is recorded:
                found[f"{label}, of the device"] = (
                    1e3 * (recorded.seconds - before) / (WARM_UPS + TIMED)
                )
            stage.leave()
            _, found[f"{name}, {nodes} nodes, in an answer"] = (
                mean_step(way, nodes) for _ in range(2)
            )
    return found


def mean_step(engine: Engine, nodes: int) -> float:
    """Milliseconds, over an answer of 200 tokens."""
    engine.forget()
    tree = source_tree(None, len(engine.heads or ())).head(nodes)
    settings = GenerationSettings(drafter="medusa", max_new_tokens=200, seed=0)
    drafter = engine.drafter(settings, tree, False)
    *_, last = engine.generate(PROMPT, drafter, settings, False)
    return 1e3 * last.stats.seconds / last.stats.steps


def shape_bench(name: str) -> dict[str, Any]:
    """The bench of a shape, as `medusa-chat bench --shape` gives it."""
    request = LoadRequest(device="cuda", precision="bf16")
    return run_shape(name, request, rounds=5, progress=progress, studies=STUDIES)


PARTS: dict[str, Callable[[], Any]] = {
    "kernel": kernel,
    "recorded parity": recorded_parity,
    "divergence, bf16": lambda: gpu_divergence.divergence("bf16"),
    "nf4 kernel": lambda: gpu_nf4.kernel_parity(CUDA),
    "nf4 merged, fp32": lambda: gpu_nf4.merged_parity(SMALL, CUDA, torch.float32),
    "nf4 merged, fp16": lambda: gpu_nf4.merged_parity(SMALL, CUDA, torch.float16),
    "nf4 products": lambda: gpu_nf4.product_times(cold, CUDA),
    "nf4 7b": lambda: gpu_nf4.step_times(SHAPES["7b"], CUDA, cold, step_times),
    "attention": attention_times,
    "7b bench": lambda: shape_bench("7b"),
    "7b recorded": lambda: recorded_times("7b"),
    "8b bench": lambda: shape_bench("8b"),
    "8b recorded": lambda: recorded_times("8b"),
    "nf4 kernel's settings": lambda: gpu_nf4.settings_times(cold, CUDA),
}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here")
    began = time.monotonic()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, part in PARTS.items():
        if time.monotonic() - began > BUDGET * 0.8:
            result[name] = "not run: time was up"
            continue
        progress(name)
        try:
            result[name] = part()
        except Exception:
            result[name] = {"failed": traceback.format_exc(limit=4)}
        release()
        result[f"{name}, seconds in all"] = round(time.monotonic() - began, 1)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
