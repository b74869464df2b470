"""The part of gpu.py about families: tiny random models of each, loaded and answering."""

import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_answers import events_of
from gpu_kernels import FORMATS
from gpu_part import Bench

from medusa_chat.bench.answers import parting
from medusa_chat.checkpoints.prepare import prepare
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import ROOT, Tree

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.engines import PROMPT, TREES  # noqa: E402
from support.families import CONTEXT, FAMILIES, tiny  # noqa: E402

DRAFTERS = ("medusa", "prompt-lookup", "auto")
TREE = TREES["walkthrough"]
COUNT = 48  # tokens of an answer


def answers(bench: Bench, name: str) -> Iterator[tuple[str, Any]]:
    """By family, in one number format: what its steps run by, and by drafter and temperature the
    first place where tokens differ from plain decoding's (None: nowhere); or its error."""
    families = bench.either(list(FAMILIES), list(FAMILIES)[:1])
    for family in families:
        try:
            yield family, _answers_of(family, torch.device(bench.device), FORMATS[name])
        except Exception as error:
            traceback.print_exc()
            yield family, f"failed: {type(error).__name__}: {error}"


def _answers_of(family: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    model = tiny(family).to(device, dtype)
    torch.manual_seed(1)
    heads = MedusaHeads(3, model.config.hidden_size, dtype=dtype).requires_grad_(False)
    torch.nn.init.normal_(heads.weight, std=0.3)
    backend, notes = prepare(model, heads.to(device), device, CONTEXT)
    engine = Engine(backend, heads)
    found: dict[str, Any] = {"notes": list(notes)}
    for temperature in (0.0, 0.8):
        plain = _tokens(engine, ROOT, temperature, "none")
        for drafter in DRAFTERS:
            ours = _tokens(engine, TREE, temperature, drafter)
            found[f"{drafter}, temperature {temperature}"] = parting(ours, plain)
    return found


def _tokens(engine: Engine, tree: Tree, temperature: float, drafter: str) -> Sequence[int]:
    engine.forget()
    return events_of(engine, PROMPT, tree, COUNT, temperature, drafter)[-1].token_ids
