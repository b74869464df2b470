"""How often greedy Medusa in half precision parts from plain decoding, and what it costs that it
never does (medusa_chat/decoding/padded_rows.py): the demo's answers, a part of gpu.py."""

import os
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from medusa_chat.bench.harness.context import read_model
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.memory import release
from medusa_chat.checkpoints.prepare import STEADY
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.prompt_ids import encode
from medusa_chat.training.conversations import read_conversations
from medusa_chat.trees.auto_tree import source_tree

QUESTIONS = Path(__file__).parent / "questions.jsonl"
NODES = (1, 16, 64)
ROWS = (1, 64)  # of every pass; 1: as many as it decodes


def divergence(precision: str, device: str = "cuda", most: int = 96) -> dict[str, Any]:
    """By rows and nodes: answers that part from plain decoding's of the same rows for every 1,000
    tokens up to there, and milliseconds of a step."""
    before = os.environ.get(STEADY)
    found: dict[str, Any] = {}
    try:
        for rows in ROWS:
            os.environ[STEADY] = str(rows)
            loaded = read_model(
                LoadRequest("demo", device=device, precision=precision), lambda said: None
            )
            found |= {f"{rows} rows, {name}": value for name, value in _of(loaded, most).items()}
            del loaded
            release()
    finally:
        os.environ.pop(STEADY)
        if before is not None:
            os.environ[STEADY] = before
    return found


def _of(loaded: LoadedModel, most: int) -> dict[str, Any]:
    asked = [row.asked[0] for row in read_conversations(QUESTIONS, prompts=True)][:most]
    loaded.said = ("", [])
    prompts = [encode(loaded, [{"role": "user", "content": text}])[0] for text in asked]
    answers = {nodes: [_answer(loaded, ids, nodes) for ids in prompts] for nodes in NODES}
    plain = [ids for ids, _ in answers[1]]
    found: dict[str, Any] = {}
    for nodes, said in answers.items():
        places = [parted_at(ids, wanted) for (ids, _), wanted in zip(said, plain, strict=True)]
        same = sum(
            len(wanted) if place is None else place
            for place, wanted in zip(places, plain, strict=True)
        )
        parted = sum(place is not None for place in places)
        found[f"{nodes} nodes, ms a step"] = median(time for _, time in said)
        if nodes > 1:
            found[f"{nodes} nodes, tokens compared"] = same
            found[f"{nodes} nodes, parted for every 1,000 tokens"] = 1000 * parted / max(same, 1)
    return found


def parted_at(ours: list[int], others: list[int]) -> int | None:
    """The first place at which two answers differ, one that ends there included; None: nowhere."""
    for place, (a, b) in enumerate(zip_longest(ours, others)):
        if a != b:
            return place
    return None


def _answer(loaded: LoadedModel, ids: list[int], nodes: int) -> tuple[list[int], float]:
    """Its tokens, greedy, and milliseconds of a step."""
    engine = loaded.engine
    tree = source_tree(loaded.calibration, loaded.info.heads).head(nodes) if nodes > 1 else ROOT
    settings = GenerationSettings(
        drafter="medusa" if nodes > 1 else "none", max_new_tokens=200, seed=0
    )
    engine.forget()
    *_, last = engine.generate(ids, engine.drafter(settings, tree, False), settings, False)
    return list(last.token_ids), 1e3 * last.stats.seconds / max(last.stats.steps, 1)
