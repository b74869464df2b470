"""The part of gpu.py about the app: the process that holds the model, as the page asks it; and each
drafter's answers in the page's way of decoding."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from gpu_divergence import context_of, place_of
from gpu_part import Bench

from medusa_chat.bench.drafters import drafters
from medusa_chat.decoding.events import Finished, Prefilled, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.requests import MeasureMemory, Reply
from medusa_chat.runtime.runner import WorkerProcess

CHAT = [{"role": "user", "content": "What is 5 + 99"}]
TOKENS = 64  # of an answer of the worker
ASKED, LENGTH, ROUNDS = 12, 256, 2  # questions of `speeds`, tokens of an answer, rounds


def worker(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Loads, answers, stops, timing and memory of a worker process; then commands of the app."""
    process = WorkerProcess()
    try:
        for precision in bench.either(("fp16", "bf16", "fp32"), ("fp32",)):
            yield f"{precision}, load", _loaded(process, bench, precision)
            for drafter in ("none", "medusa", "auto"):
                yield f"{precision}, {drafter}", _answered(process, drafter)
        yield "stopped", _stopped(process)
        yield "once more", _answered(process, "auto")
        memory = [found.__dict__ for found in process.run(MeasureMemory())]
        yield "memory", memory
        yield "gone", str(process.gone())
    finally:
        process.close()
    flag = ["--device", bench.device]
    generate = ["generate", "--prompt", "What is 5 + 99", *flag, "--max-new-tokens", "32"]
    for command in bench.either((["doctor"], generate), (["--version"],)):
        yield " ".join(command[:1]), _said([sys.executable, "-m", "medusa_chat", *command])


def _loaded(process: WorkerProcess, bench: Bench, precision: str) -> dict[str, Any]:
    began = perf_counter()
    *_, last = process.run(LoadRequest("demo", device=bench.device, precision=precision))
    spent, info = perf_counter() - began, last.model
    assert info is not None
    return {"seconds": spent, "memory": info.memory_bytes, "estimated": info.estimated_bytes} | {
        "device": info.device,
        "notes": info.notes,
    }


def _answered(process: WorkerProcess, drafter: str) -> dict[str, Any]:
    settings = GenerationSettings(drafter, temperature=0.0, max_new_tokens=TOKENS, seed=0)
    began = perf_counter()
    events = list(process.run(Reply(CHAT, settings)))
    first, last = events[0], events[-1]
    assert isinstance(first, Prefilled) and isinstance(last, Finished)
    return {
        "text": last.text,
        "reason": last.reason,
        "tokens a second": last.stats.tokens_per_second,
        "tokens a step": last.stats.acceleration_rate,
        "seconds until all was here": perf_counter() - began,
        "runs by": first.backend,
    }


def _stopped(process: WorkerProcess) -> dict[str, Any]:
    """An answer that is stopped after its fifth step."""
    settings = GenerationSettings("auto", temperature=0.7, max_new_tokens=900, seed=0)
    story = [{"role": "user", "content": "Tell me a long story."}]
    count, asked = 0, 0.0
    for event in process.run(Reply(story, settings)):
        count += isinstance(event, Step)
        if count == 5 and not asked:
            asked = perf_counter()
            threading.Thread(target=process.stop).start()
    return {"steps": count, "reason": event.reason, "seconds": perf_counter() - asked}


def _said(command: list[str]) -> dict[str, Any]:
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, cwd=folder)
    return {"exit": done.returncode, "out": done.stdout[-3000:], "err": done.stderr[-3000:]}


def speeds(bench: Bench, precision: str) -> Iterator[tuple[str, Any]]:
    """Of --model: every drafter on the same questions, as `bench --study drafters`."""
    sizes = bench.either((ASKED, LENGTH, ROUNDS), (1, 12, 1))
    began = perf_counter()
    context = context_of(bench, place_of(bench), precision, *sizes)
    loaded = context.loaded
    yield "seconds of the load", perf_counter() - began
    yield "notes", loaded.info.notes
    yield "drafters", list(drafters(context))
    yield "tree", loaded.info.tree_reason
    learnt = {name: asdict(budget.learnt) for name, budget in loaded.budgets.items()}
    yield "learnt", learnt
