"""On a CUDA machine: `python assets/benchmarks/gpu.py > result.json`, under ten minutes.

Parity of the split-attention kernel, of the captured step, of our 4-bit product and of merged 4-bit
layers, then times: 4-bit products and steps of a 7B shape, the bench of a 7B and an 8B shape with
random weights, in bf16; no download. Each part is told apart and may fail alone; a part that begins
too late is shown as not run. This file was written without a GPU at hand: it has never been run on
one.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import gpu_nf4
import torch

from medusa_chat.bench import run_shape
from medusa_chat.bench.shape import SHAPES, Shape, load_shape
from medusa_chat.checkpoint import source_tree
from medusa_chat.decoding import split_attention
from medusa_chat.decoding.captured import Captured
from medusa_chat.decoding.rehearsal import Stage
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.messages import LoadRequest

CUDA = torch.device("cuda")
BUDGET = 540.0  # seconds for everything
SMALL = Shape("small", 512, 1376, 4, 8, 4, 4096, 4096)
PROMPT = [(7 * i + 3) % 4096 for i in range(200)]
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
                lambda f=function, k=key, q=query, m=mask: f(torch.nn.Module(), q, k, k, m, 0.1)
            )
    return found


def timed(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds of a call, by the device's own clock."""
    for _ in range(5):
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


def captured_parity() -> dict[str, Any]:
    """Captured steps against the engine's own, token for token, in fp32 and bf16."""
    found = {}
    for precision in ("fp32", "bf16"):
        loaded = load_shape(SMALL, LoadRequest(device="cuda", precision=precision))
        engine = loaded.engine
        settings = GenerationSettings(drafter="none", max_new_tokens=200, seed=0)
        plain = engine.drafter(settings, ROOT)
        *_, last = engine.generate(PROMPT, plain, settings)
        for nodes in (1, 16, 64):
            tokens = run_captured(loaded, nodes, 200)
            same = next(
                (i for i, (a, b) in enumerate(zip(tokens, last.token_ids, strict=False)) if a != b),
                None,
            )
            found[f"{precision}, {nodes} nodes: first difference"] = same
    return found


def run_captured(loaded: Any, nodes: int, count: int) -> list[int]:
    """Tokens of a captured answer to PROMPT."""
    engine = loaded.engine
    settings = GenerationSettings(drafter="none", max_new_tokens=count, seed=0)
    engine.forget()
    events = engine.generate(PROMPT, engine.drafter(settings, ROOT), settings)
    tokens = list(next(events).token_ids)
    events.close()
    weight = engine.heads.bias
    tree = source_tree(None, len(engine.heads)).head(nodes)
    made = Captured(engine.backbone, engine.heads, tree, settings)
    hidden = weight.new_full((1, weight.shape[-1]), 0.1)
    for step in made.run(torch.tensor(tokens, device="cuda"), hidden):
        tokens += step.tokens
        if len(tokens) >= count:
            break
    engine.forget()
    return tokens[:count]


def captured_times(name: str) -> dict[str, Any]:
    """`step_times` of a shape in bf16."""
    return step_times(load_shape(SHAPES[name], LoadRequest(device="cuda", precision="bf16")).engine)


def step_times(engine: Any) -> dict[str, Any]:
    """Milliseconds of a step, eager and captured, by nodes, behind 1,024 tokens."""
    found: dict[str, Any] = {}
    source = source_tree(None, len(engine.heads))
    settings = GenerationSettings(drafter="none", max_new_tokens=1, seed=0)
    engine.backbone.cache.fill(1100)
    for nodes in (1, 8, 16, 32, 64):
        engine.backbone.cache.length = 0
        stage = Stage(engine, source)
        found[f"eager, {nodes} nodes"] = timed(lambda n=nodes, s=stage: s.step(n, 900))
        stage.leave()
        made = Captured(engine.backbone, engine.heads, source.head(nodes), settings)
        made.state.cur.fill_(900)
        try:
            step = made._step(900)
        except RuntimeError as error:  # what eager steps take is told all the same
            found[f"captured, {nodes} nodes"] = f"not captured: {error}"
            continue

        def replay(step: Any = step, made: Any = made) -> None:
            made.state.cur.fill_(900)
            step()

        found[f"captured, {nodes} nodes"] = timed(replay)
    return found


def shape_bench(name: str) -> dict[str, Any]:
    """The bench of a shape, as `medusa-chat bench --shape` gives it."""
    request = LoadRequest(device="cuda", precision="bf16")
    return run_shape(name, request, rounds=5, progress=progress, studies=STUDIES)


PARTS: dict[str, Callable[[], Any]] = {
    "kernel": kernel,
    "captured parity": captured_parity,
    "nf4 kernel": lambda: gpu_nf4.kernel_parity(CUDA),
    "nf4 merged, fp32": lambda: gpu_nf4.merged_parity(SMALL, CUDA, torch.float32),
    "nf4 merged, fp16": lambda: gpu_nf4.merged_parity(SMALL, CUDA, torch.float16),
    "nf4 products": lambda: gpu_nf4.product_times(cold, CUDA),
    "nf4 7b": lambda: gpu_nf4.step_times(SHAPES["7b"], CUDA, cold, step_times),
    "attention": attention_times,
    "7b bench": lambda: shape_bench("7b"),
    "7b captured": lambda: captured_times("7b"),
    "8b bench": lambda: shape_bench("8b"),
    "8b captured": lambda: captured_times("8b"),
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
        torch.cuda.empty_cache()
        result[f"{name}, seconds in all"] = round(time.monotonic() - began, 1)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
