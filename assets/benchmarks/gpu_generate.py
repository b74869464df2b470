"""The parts of gpu.py about transformers' `generate` of 7B's shape, beside our own steps."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from gpu_part import Bench
from gpu_steps import NODES, label, shape_of

from medusa_chat.bench.answers import Question
from medusa_chat.bench.hf_baseline import HFBaseline, compiled, no_compiler
from medusa_chat.bench.random_model import random_weights

PROMPT, ANSWER = 1000, 64  # tokens
BESIDE = "7b-fp16"  # the part of gpu.py with our steps


def dynamic(bench: Bench) -> Iterator[tuple[str, Any]]:
    """As users call it: greedy, by operators, a cache that grows."""
    yield from _figures(bench, {})


def static(bench: Bench) -> Iterator[tuple[str, Any]]:
    """With a static cache and a compiled step, once it is compiled."""
    if why := no_compiler(bench.device):
        sys.exit(f"left out: {why}")
    yield from _figures(bench, compiled(torch.device(bench.device), PROMPT + ANSWER))


def _figures(bench: Bench, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Milliseconds a token without the prefill, and times of our steps' speed against it."""
    shape = shape_of(bench, "7b", PROMPT + ANSWER)
    torch.manual_seed(0)
    model, _ = random_weights(shape, torch.device(bench.device), torch.float16)
    baseline = HFBaseline(model, frozenset({0}), bench.either(ANSWER, 6), PROMPT + ANSWER)
    prompt = Question([(7 * i + 3) % shape.vocabulary for i in range(PROMPT)], "")
    rounds = []
    for number in range(3):  # the first warms up and compiles
        found, seconds = baseline.answer(prompt, **options)
        if number:
            rounds.append(1e3 * found.seconds / max(found.steps, 1))
        yield "seconds of the first answer" if not number else f"round {number}, s", seconds
    ms = min(rounds)
    yield "ms a token", ms
    for nodes in NODES:
        yield from _beside(bench, nodes, ms)


def _beside(bench: Bench, nodes: int, ms: float) -> Iterator[tuple[str, Any]]:
    """How many times as fast our steps of so many nodes are, by the part that timed them."""
    ours = bench.figure(BESIDE, label(nodes, PROMPT), "ms")
    plain = bench.figure(BESIDE, label(1, PROMPT), "ms")
    gain = bench.figure(BESIDE, label(nodes, PROMPT), "speedup over plain, modelled")
    if nodes == 1:
        yield "our plain decoding, times as fast", ours and ms / ours
    else:
        name = f"our Medusa, {nodes} nodes, acceptance modelled, times as fast"
        yield name, ours and plain and gain and gain * ms / plain
