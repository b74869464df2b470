"""HFBaseline: the published model under transformers' own `generate`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig
from transformers.utils import logging

from medusa_chat.bench.answers import Question, Run
from medusa_chat.bench.context import BenchContext
from medusa_chat.checkpoints import weights
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.layouts.drafters import drafter_in
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.decoding.families import needs_eager
from medusa_chat.errors import ContextError, UsageError
from medusa_chat.units import gb

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DRAFT_FOLDER = "draft"  # in the folder of the backbone


class PassTimer:
    """A streamer for `generate` that records the end of every pass (seconds) and its number of
    tokens. The first entry is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: Any) -> None:
        self.times.append(perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        """Part of a streamer's interface; there is nothing to close."""


@dataclass(frozen=True)
class HFBaseline:
    """The published model in transformers. ends: ids of the end tokens. max_new_tokens: of an
    answer. context: most tokens of prompt and answer."""

    model: Any
    ends: frozenset[int]
    max_new_tokens: int
    context: int

    def answer(self, question: Question, **options: Any) -> tuple[Run, float]:
        """An answer as a Run, without its first pass, the prefill; and the seconds of the whole
        call. Greedy unless the options of `generate` say otherwise. Raises ContextError where the
        prompt leaves no space for a token."""
        if len(question.ids) >= self.context:
            raise ContextError("the context has no space for an answer")
        timer, count = PassTimer(), len(question.ids)
        prompt = torch.tensor([question.ids], device=self.model.device)
        started = perf_counter()
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(self.max_new_tokens, self.context - count),
            eos_token_id=sorted(self.ends),
            pad_token_id=min(self.ends, default=0),
            streamer=timer,
            **({"do_sample": False} | options),
        )
        found = out[0, count:].tolist()
        seconds = perf_counter() - started
        tokens = tuple(token for token in found if token not in self.ends)
        stepped, stepping = float(sum(timer.counts[2:])), timer.times[-1] - timer.times[1]
        return Run(question, tokens, len(timer.times) - 2, stepped, stepping), seconds


def read_baseline(context: BenchContext, dtype: str) -> HFBaseline:
    """The backbone again, as transformers loads it. dtype: a value of DTYPES."""
    found = Checkpoint.find(context.request)
    engine = context.loaded.engine
    if found.weights.stored:
        model = _unpacked(context, found, dtype)
    else:
        context.progress(f"loading: the baseline in {dtype}")
        model = _read(context, found.backbone, dtype)
    return HFBaseline(model, engine.eos, context.max_new_tokens, engine.backbone.context)


def _unpacked(context: BenchContext, found: Checkpoint, dtype: str) -> Any:
    """A GGUF file's model in transformers, which does not multiply its blocks."""
    size = sizes(found.weights.config).parameters * getattr(torch, dtype).itemsize
    context.progress(f"loading: the baseline in {dtype}, unpacked in memory ({gb(size)})")
    found = with_settings(found)
    precision = next(name for name, value in DTYPES.items() if value == dtype)
    device = context.loaded.engine.backbone.device
    model = weights.read_model(found, weights.config_of(found), precision, device)
    model.set_attn_implementation("eager" if needs_eager(model) else "sdpa")
    return model


def matching_baseline(context: BenchContext) -> HFBaseline | None:
    """The baseline in the precision of the loaded model; None where that is quantised."""
    dtype = DTYPES.get(context.loaded.info.precision)
    return None if dtype is None else read_baseline(context, dtype)


def read_draft(context: BenchContext, dtype: str) -> Any | None:
    """The draft model of --draft, or the one in the backbone's folder; None without one. Raises
    UsageError for a draft model with another vocabulary."""
    named = next(map(Path, context.request.drafts), None)
    if named and not (named.is_dir() and drafter_in(LocalFolder(named)) is None):
        named = None  # transformers reads folders, and knows no such drafter
    folder = context.draft or named or Checkpoint.find(context.request).backbone / DRAFT_FOLDER
    if not (folder / "config.json").is_file():
        if context.draft is not None:
            raise UsageError(
                f"{folder} is not a model folder: give a folder with a config.json as --draft"
            )
        return None
    context.progress(f"loading: the draft model in {dtype}")
    model = _read(context, folder, dtype)
    ours, theirs = context.loaded.engine.backbone.vocabulary, model.config.vocab_size
    if ours != theirs:
        raise UsageError(
            f"{folder} has a vocabulary of {theirs} tokens and the backbone one of {ours}: give "
            "another --draft"
        )
    return model


def _read(context: BenchContext, folder: str | Path, dtype: str) -> Any:
    device = context.loaded.engine.backbone.device
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), device_map={"": device}, local_files_only=True
    ).eval()


@contextmanager
def drafting(draft: Any, tokens: int) -> Iterator[dict[str, Any]]:
    """Options of assisted generation with exactly `tokens` draft tokens at each step. The draft
    model's own settings are restored afterwards. Meanwhile only errors are logged: transformers
    warns about its own calls."""
    config, level = draft.generation_config, logging.get_verbosity()
    wanted = {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    before = {name: getattr(config, name, None) for name in wanted}
    try:
        config.update(**wanted)
        logging.set_verbosity_error()
        yield {"assistant_model": draft}
    finally:
        config.update(**before)
        logging.set_verbosity(level)


def compiled(device: torch.device, room: int) -> dict[str, Any]:
    """Options of `generate` with a static cache and a compiled step, on a CPU as well. room: most
    tokens of prompt and answer."""
    config = CompileConfig(mode="reduce-overhead" if device.type == "cuda" else "default")
    setattr(config, "_compile_all_devices", True)  # noqa: B010 (declared as None alone)
    return {"cache_implementation": "static", "max_cache_len": room, "compile_config": config}


def no_compiler(device: str) -> str:
    """Why torch.compile cannot be used here, "" where it can."""
    if device.startswith("cuda"):
        return "" if find_spec("triton") else "torch.compile needs Triton, which is not installed"
    compiler = os.environ.get("CXX", "g++")
    return "" if shutil.which(compiler) else f"torch.compile needs a C++ compiler: no {compiler}"
