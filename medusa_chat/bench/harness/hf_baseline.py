"""HFBaseline: the published model under transformers' own `generate`."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.report_data import Question, Run
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DRAFT_FOLDER = "draft"  # beside the weights of the backbone that it drafts for


@dataclass(frozen=True)
class Said:
    """One answer of `generate`. tokens: without the end token. seconds: of the whole call.

    The first pass reads the prompt and is left out of the rest: steps counts the passes after it,
    stepped the tokens that they gave (an end token counts), stepping their seconds.
    """

    tokens: tuple[int, ...]
    seconds: float
    steps: int
    stepped: int
    stepping: float


class Watch:
    """Where `generate` wants a streamer: notes when a pass had ended and how many tokens it gave.
    The first that it is told of is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: Any) -> None:
        self.times.append(perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True)
class HFBaseline:
    """A stock model, the end tokens and the length of its answers, and what its context holds."""

    model: Any
    ends: frozenset[int]
    max_new_tokens: int
    context: int

    def answer(self, ids: list[int], **options: Any) -> Said:
        """A greedy answer, or as the options of `generate` have it, within the context, which must
        have room for a token."""
        import torch

        watch = Watch()
        prompt = torch.tensor([ids], device=self.model.device)
        started = perf_counter()
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(self.max_new_tokens, self.context - len(ids)),
            eos_token_id=sorted(self.ends),
            pad_token_id=min(self.ends, default=0),
            streamer=watch,
            **({"do_sample": False} | options),
        )
        found = out[0, len(ids) :].tolist()
        seconds = perf_counter() - started
        tokens = tuple(token for token in found if token not in self.ends)
        stepping = watch.times[-1] - watch.times[1]
        return Said(tokens, seconds, len(watch.times) - 2, sum(watch.counts[2:]), stepping)


def read_stock(course: BenchContext, dtype: str) -> HFBaseline:
    """The backbone of the course again, as transformers loads it, in one of DTYPES' values."""
    found = Checkpoint.find(course.request).backbone
    course.progress(f"loading: the stock model in {dtype}")
    engine = course.loaded.engine
    context = engine.backbone.context
    return HFBaseline(_read(course, found, dtype), engine.eos, course.max_new_tokens, context)


def same_precision(course: BenchContext) -> HFBaseline | None:
    """In the precision of the loaded model; None where that is quantised."""
    dtype = DTYPES.get(course.loaded.info.precision)
    return None if dtype is None else read_stock(course, dtype)


def read_draft(course: BenchContext, dtype: str) -> Any | None:
    """The draft model of --draft, or the one that lies beside the backbone; None without one.
    Raises UsageError for one of another vocabulary."""
    folder = course.draft or Path(Checkpoint.find(course.request).backbone) / DRAFT_FOLDER
    if not (folder / "config.json").is_file():
        if course.draft is not None:
            raise UsageError(f"{folder} is no model: give a folder with a config.json")
        return None
    course.progress(f"loading: the draft model in {dtype}")
    model = _read(course, folder, dtype)
    ours, theirs = course.loaded.engine.backbone.vocabulary, model.config.vocab_size
    if ours != theirs:
        raise UsageError(f"{folder} knows {theirs} tokens and the backbone {ours}: give another")
    return model


def _read(course: BenchContext, folder: str | Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    device = course.loaded.engine.backbone.device
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), device_map={"": device}, local_files_only=True
    ).eval()


def baseline_run(stock: HFBaseline, question: Question, options: Mapping[str, Any]) -> Run | None:
    """An answer of `generate` in the words of our own, its first pass left out; None where the
    context has no room for one."""
    if len(question.ids) >= stock.context:
        return None
    said = stock.answer(question.ids, **options)
    return Run(question, said.tokens, said.steps, float(said.stepped), said.stepping)


def sampling(settings: GenerationSettings) -> dict[str, Any]:
    """Options of `generate` for a temperature."""
    if not settings.temperature:
        return {}
    return {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}


@contextmanager
def drafting(draft: Any, tokens: int) -> Iterator[dict[str, Any]]:
    """Options of assisted generation that drafts `tokens` tokens at each step, no fewer and no
    more; the draft model's own settings are as they were afterwards. transformers warns of how it
    calls itself there, which says nothing to a reader: only errors are shown meanwhile."""
    from transformers.utils import logging

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


def compiled(course: BenchContext, longest: int) -> dict[str, Any]:
    """Options of `generate` with a static cache for prompts of at most `longest` tokens and the
    step compiled, on a CPU too."""
    from transformers import CompileConfig

    on_cuda = course.loaded.engine.backbone.device.type == "cuda"
    config = CompileConfig(mode="reduce-overhead" if on_cuda else "default")
    config._compile_all_devices = True
    room = longest + course.max_new_tokens
    return {"cache_implementation": "static", "max_cache_len": room, "compile_config": config}


def no_compiler(device: str) -> str:
    """Why torch.compile cannot be had here, "" where it can."""
    if device.startswith("cuda"):
        from importlib.util import find_spec

        return "" if find_spec("triton") else "torch.compile needs Triton, which is not installed"
    compiler = os.environ.get("CXX", "g++")
    return "" if shutil.which(compiler) else f"torch.compile needs a C++ compiler: no {compiler}"
