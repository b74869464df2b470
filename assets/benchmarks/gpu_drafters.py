"""The part of gpu.py about drafters beside a backbone: an EAGLE drafter of random weights."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
from gpu_answers import events_of, prompt_of
from gpu_part import Bench
from gpu_steps import DRY_LENGTH, FIRST, ROOM, shape_of
from torch import nn
from transformers import LlamaConfig, LlamaModel

from medusa_chat.bench.random_model import load_shape
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.budget import WHOLE, Allowance
from medusa_chat.decoding.drafters.drafter import Candidates
from medusa_chat.decoding.drafters.eagle import Eagle
from medusa_chat.decoding.drafters.eagle_model import EagleForm, EagleModel
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.decoding.drafters.recorded_draft import RecordedDraft
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.step import TorchStep
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.shapes import chain

NODES = (6, 16, 32)
DRAFTS, COUNT = 30, 48  # drafts that are timed, and tokens of an answer
RECORDED, LED = "levels at once, recorded", "levels one after another"


def steps(bench: Bench, shape: str, precision: str, length: int) -> Iterator[tuple[str, Any]]:
    """Drafts, and whole steps with them, behind `length` tokens: recorded, and by operators. The
    two must draft the same; random weights accept nothing."""
    torch.manual_seed(0)
    request = LoadRequest(device=bench.device, precision=precision, max_context=length + ROOM)
    backbone = load_shape(shape_of(bench, shape, length + ROOM), request).engine.backbone
    drafter = eagle_of(backbone)
    recorded = CudaGraphStep(backbone)
    plain = Engine(recorded)
    prompt = prompt_of(plain, bench.either(length, DRY_LENGTH))
    yield "plain step, recorded, ms", _step_ms(plain, prompt, 1)
    for nodes in NODES:
        found: dict[str, Any] = {}
        drafts = {}
        for name, own in ((RECORDED, RecordedDraft(backbone.device)), (LED, None)):
            drafter.recorded = own
            by_pass, by_operators = (
                Engine(way, drafter=drafter) for way in (recorded, TorchStep(backbone))
            )
            found[f"step, {name}, pass recorded, ms"] = _step_ms(by_pass, prompt, nodes)
            found[f"step, {name}, pass by operators, ms"] = _step_ms(by_operators, prompt, nodes)
            drafts[name] = _draft(drafter, nodes)
            found[f"draft, {name}, ms"] = _draft_ms(drafter, nodes)
        found["the same draft both ways"] = drafts[RECORDED].tokens == drafts[LED].tokens
        yield f"{nodes} nodes", found
    yield "steps whose pass was recorded, s", recorded.by_pass.seconds


def eagle_of(backbone: Backbone) -> Eagle:
    """A drafter of EAGLE-1's shape: a layer of the backbone's width, its embeddings and LM head."""
    own = backbone.config
    config = LlamaConfig(
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads,
        num_hidden_layers=1,
        vocab_size=8,
    )
    decoder = LlamaModel(config).to(backbone.device, backbone.dtype)
    fc = nn.Linear(2 * own.hidden_size, own.hidden_size, bias=False)
    fc = fc.to(backbone.device, backbone.dtype)
    lent = Lent(backbone.model.get_input_embeddings(), backbone.lm_head, own)
    nothing = (None,) * 4
    model = EagleModel(
        EagleForm(), decoder, fc, [], *nothing, lent, backbone.vocabulary, None
    ).requires_grad_(False)
    return Eagle(model, backbone.context, backbone.vocabulary)


def _step_ms(engine: Engine, prompt: list[int], nodes: int) -> float:
    """Milliseconds of a step of an answer, the median; a tree of one node is plain decoding's."""
    engine.forget()
    events = events_of(engine, prompt, chain(nodes - 1), COUNT, drafter="eagle")
    seconds = [event.seconds for event in events if isinstance(event, Step)]
    return 1e3 * median(seconds[FIRST:] or seconds)


def _draft(drafter: Eagle, nodes: int) -> Candidates:
    """A draft behind the text that the drafter was told of."""
    return drafter.draft(5, 64, Allowance(nodes, WHOLE))


def _draft_ms(drafter: Eagle, nodes: int) -> float:
    """Milliseconds of it, the median; the host waits for it."""
    seconds = []
    for _ in range(DRAFTS):
        start = perf_counter()
        _draft(drafter, nodes)
        seconds.append(perf_counter() - start)
    return 1e3 * median(seconds)
