"""Studies "turns" (time to the first token) and "load" (seconds and peak memory)."""

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers  # noqa: F401

from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.rows import Row, row, unmeasured
from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.events import Prefilled
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import Reply
from medusa_chat.units import gb

REPEATS = 3  # of a round, since the times are short
TURN = 24  # new tokens of a turn
SETTINGS = GenerationSettings(drafter="none", max_new_tokens=1, nodes=1, seed=0)


def turns(context: BenchContext) -> Iterator[Row]:
    """Time to the first token of a later turn, against a bare pass over its new tokens with that
    cache, and against a prefill of these tokens with an empty cache."""
    context.progress("turns")
    engine = context.loaded.engine
    whole = min(512, engine.backbone.context - 2 * TURN)
    held = [(31 * i + 7) % engine.backbone.vocabulary for i in range(whole)]
    new = [(17 * i + 5) % engine.backbone.vocabulary for i in range(TURN)]
    later, bare, alone, anew = list[float](), list[float](), list[float](), list[float]()
    for number in range(REPEATS * context.rounds + 1):
        engine.forget()
        _first(context, held)
        found = _first(context, [*held, *new])
        passed = _pass(context, whole, new)
        engine.forget()
        only = _first(context, new)
        engine.forget()
        full = _first(context, [*held, *new])
        if number:
            later.append(1e3 * found)
            bare.append(1e3 * passed)
            alone.append(1e3 * only)
            anew.append(1e3 * full)
    engine.forget()
    name = "first token of a later turn"
    note = f"{TURN} new tokens behind {whole}"
    yield row(name, later, "ms", f"a bare pass over these {TURN}", bare, note)
    label, nothing = "the same behind nothing", f"prefill of {TURN} tokens alone"
    yield row(label, later, "ms", nothing, alone, "the held tokens are attended to")
    yield row("the same without reuse", anew, "ms", name, later)


def _pass(context: BenchContext, held: int, new: list[int]) -> float:
    """Seconds of a pass over new tokens after `held` tokens in the cache, with the choice of the
    next token."""
    backbone = context.loaded.engine.backbone
    tokens = torch.tensor(new, device=backbone.device)
    backbone.cache.crop(held)
    with torch.inference_mode():
        return context.seconds(
            lambda: int(backbone.lm_head(backbone.run_chunk(tokens)[-1:]).argmax())
        )


def _first(context: BenchContext, ids: list[int]) -> float:
    """Seconds to the first token of an answer."""
    engine = context.loaded.engine
    context.synchronise()
    events = engine.generate(ids, engine.drafter(SETTINGS, ROOT), SETTINGS, False)
    return next(event.seconds for event in events if isinstance(event, Prefilled))


def memory_and_load(context: BenchContext) -> Iterator[Row]:
    """A load and an answer in a new process: the seconds, and the peak of memory over the bytes of
    weights, heads and cache."""
    context.progress("a load in a process of its own")
    if sys.platform != "linux":
        yield unmeasured("load", "s", "only on Linux")
        yield unmeasured("peak memory", "x", "only on Linux")
        return
    spawn = multiprocessing.get_context("spawn")
    pipe, child = spawn.Pipe()
    process = spawn.Process(target=_load_alone, args=(context.request, child), daemon=True)
    process.start()
    child.close()
    try:
        found: dict[str, float] = pipe.recv()
    except EOFError:
        found = {}
    process.join(10)
    if not found:
        yield unmeasured("load", "s", "the process ended early")
        yield unmeasured("peak memory", "x", "the process ended early")
        return
    yield row("load", [found["load"]], "s", note="torch imported before, warm-up included")
    note = f"{gb(found['peak'])} over what the process held before the load"
    ratio = found["peak"] / found["bytes"]
    against = "weights + heads + cache"
    yield row("peak memory", [ratio], "x", against, [1.0], note)


def _load_alone(request: LoadRequest, pipe: Any) -> None:
    """In the child process: load, answer once, send seconds and bytes."""
    before = _peak()
    started = perf_counter()
    *_, (_, loaded) = load(request)
    seconds = perf_counter() - started
    assert loaded is not None
    settings = GenerationSettings(max_new_tokens=32, seed=0)
    for _ in reply(loaded, Reply("What is the capital of Spain?", settings)):
        pass
    is_cuda = loaded.info.device.startswith("cuda")
    peak = torch.cuda.max_memory_allocated() if is_cuda else _peak() - before
    pipe.send({"load": seconds, "peak": peak, "bytes": loaded.info.memory_bytes})
    pipe.close()


def _peak() -> int:
    """Peak bytes of main memory of this process (getrusage would include its parent's)."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
