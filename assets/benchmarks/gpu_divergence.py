"""The parts of gpu.py about exactness: where greedy Medusa parts from plain decoding, by format."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_part import Bench

from medusa_chat.bench.answers import Run, mean_step, page_run, questions
from medusa_chat.bench.context import BenchContext, read_model
from medusa_chat.bench.exactness import MODES, differences
from medusa_chat.checkpoints.devices import release
from medusa_chat.messages import LoadRequest

QUESTIONS = Path(__file__).parent / "questions.jsonl"
FORMATS = ("fp16", "bf16", "nf4", "fp32")
NODES = (16, 64)
ASKED, TOKENS = 24, 128  # questions, and tokens of an answer


def demo(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Of the demo."""
    yield from _by_format(bench, ("demo",))


def model(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Of --model; without heads prompt lookup drafts."""
    yield from _by_format(bench, place_of(bench))


def place_of(bench: Bench) -> Sequence[str]:
    """LoadRequest's first fields, of --model."""
    if bench.model is None:
        sys.exit("left out: give a small model as --model")
    return bench.model.split(",")


def _by_format(bench: Bench, place: Sequence[str]) -> Iterator[tuple[str, Any]]:
    count, length = bench.either((ASKED, TOKENS), (2, 12))
    for precision in FORMATS:
        if precision == "nf4" and find_spec("bitsandbytes") is None:
            yield precision, "left out: bitsandbytes is not installed"
            continue
        yield from _divergence(context_of(bench, place, precision, count, length, 1))
        release()


def context_of(
    bench: Bench, place: Sequence[str], precision: str, count: int, length: int, rounds: int
) -> BenchContext:
    """The model at a place, for `count` of our questions, with answers of `length` tokens."""
    request = LoadRequest(*place, device=bench.device, precision=precision)
    asked = {"prompts": QUESTIONS, "questions": count}
    loaded = read_model(request, _quiet)
    return BenchContext(request, loaded, "auto", rounds, length, _quiet, **asked)


def _quiet(said: str) -> None:
    pass


def _divergence(context: BenchContext) -> Iterator[tuple[str, Any]]:
    """By nodes: places where the text parts from plain decoding's, with how much larger the logit
    of plain decoding's token is there; tokens and milliseconds a step."""
    info, asked, settings = context.loaded.info, questions(context), MODES["greedy"]
    drafter = "medusa" if info.heads else "prompt-lookup"

    def answered(nodes: int) -> list[Run]:
        wanted = replace(settings, drafter=drafter if nodes > 1 else "none", nodes=nodes)
        return [page_run(context, question, wanted) for question in asked]

    plain = answered(1)
    yield f"{info.precision}, plain, ms a step", 1e3 * mean_step(plain)
    for nodes in NODES:
        said = answered(nodes)
        found = differences(context, plain, said, settings)
        beyond = sum(len(plain[one.question].tokens) - one.token for one in found)
        same = sum(len(run.tokens) for run in plain) - beyond
        figures = {
            "tokens compared": same,
            "parted for every 1,000 tokens": 1000 * len(found) / max(same, 1),
            "parted": [one._asdict() for one in found],
            "tokens a step": sum(run.stepped for run in said) / sum(run.steps for run in said),
            "ms a step": 1e3 * mean_step(said),
        }
        yield f"{info.precision}, {nodes} nodes", figures
