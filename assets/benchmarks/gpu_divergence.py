"""The parts of gpu.py about exactness: where greedy Medusa parts from plain decoding, by format."""

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_answers import events_of, parted_at
from gpu_part import Bench

from medusa_chat.bench.harness.context import read_model
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.memory import release
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.prompt_ids import encode
from medusa_chat.training.conversations import read_conversations
from medusa_chat.trees.auto_tree import source_tree

QUESTIONS = Path(__file__).parent / "questions.jsonl"
FORMATS = ("fp16", "bf16", "nf4", "fp32")
NODES = (16, 64)
ASKED, TOKENS = 24, 128  # questions, and tokens of an answer
HEADS = 4  # where a model has none


def demo(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Of the demo, with its heads."""
    yield from _by_format(bench, ("demo",))


def model(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Of --model; without heads, with ones that repeat the backbone's own guesses: little they
    draft is accepted, but every step is a tree's."""
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
        request = LoadRequest(*place, device=bench.device, precision=precision)
        loaded = read_model(request, lambda said: None)
        yield from divergence(precision, loaded, count, length)
        del loaded
        release()


def divergence(
    name: str, loaded: LoadedModel, count: int, length: int
) -> Iterator[tuple[str, Any]]:
    """By nodes, for `count` questions and answers of `length` tokens: places where Medusa's text
    parts from plain decoding's, with how much larger the logit of plain decoding's token is there;
    tokens and milliseconds a step."""
    engine, prompts = _with_heads(loaded.engine), _prompts(loaded, count)
    plain = [_answer(loaded, engine, ids, 1, length) for ids in prompts]
    yield f"{name}, plain, ms a step", _step_ms(plain)
    for nodes in NODES:
        said = [_answer(loaded, engine, ids, nodes, length) for ids in prompts]
        texts = [
            (ours.token_ids, wanted.token_ids) for ours, wanted in zip(said, plain, strict=True)
        ]
        found = [parted_at(*pair) for pair in texts]
        same = sum(
            len(wanted) if place is None else place
            for place, (_, wanted) in zip(found, texts, strict=True)
        )
        parted = [
            {"question": number, "place": place, "logits apart": _apart(engine, ids, *pair, place)}
            for number, (ids, pair, place) in enumerate(zip(prompts, texts, found, strict=True))
            if place is not None
        ]
        yield (
            f"{name}, {nodes} nodes",
            {
                "tokens compared": same,
                "parted for every 1,000 tokens": 1000 * len(parted) / max(same, 1),
                "parted": parted,
                "answers with invalid numbers": sum(
                    one.reason == "error" for one in (*said, *plain)
                ),
                "tokens a step": median(one.stats.acceleration_rate or 1.0 for one in said),
                "ms a step": _step_ms(said),
            },
        )


def _apart(
    engine: Engine, prompt: list[int], ours: Sequence[int], others: Sequence[int], place: int
) -> float | None:
    """The logit of plain decoding's token there minus that of Medusa's, after the text that both
    have; None where one of them ends."""
    if place >= min(len(ours), len(others)):
        return None
    logits, _ = engine.peek([*prompt, *others[:place]], ())
    return float(logits[others[place]] - logits[ours[place]])


def _prompts(loaded: LoadedModel, count: int) -> list[list[int]]:
    asked = [row.asked[0] for row in read_conversations(QUESTIONS, prompts=True)][:count]
    loaded.said = ("", [])
    is_chat = bool(loaded.tokenizer.chat_template)
    return [
        list(encode(loaded, [{"role": "user", "content": text}] if is_chat else text)[0])
        for text in asked
    ]


def _with_heads(engine: Engine) -> Engine:
    """The engine, with heads of zeros where the checkpoint has none."""
    if engine.heads is not None:
        return engine
    backbone = engine.backbone
    with torch.device(backbone.device):
        heads = MedusaHeads(HEADS, backbone.config.hidden_size, dtype=backbone.dtype)
    return Engine(engine.backend, heads.requires_grad_(False), engine.eos)


def _answer(loaded: LoadedModel, engine: Engine, ids: list[int], nodes: int, length: int) -> Any:
    """The last event of a greedy answer."""
    tree = source_tree(loaded.calibration, len(engine.heads or ())).head(nodes)
    engine.forget()
    return events_of(engine, ids, tree, length)[-1]


def _step_ms(answers: Sequence[Any]) -> float:
    return median(1e3 * one.stats.seconds / max(one.stats.steps, 1) for one in answers)
