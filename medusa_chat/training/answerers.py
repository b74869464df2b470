"""Answerers: a backbone's own answers to prompts, by our engine or by transformers in batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.tokenizer import end_tokens
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import cpu_threads, native
from medusa_chat.decoding.backends.torch_step import TorchStep
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.fused_layers import replace_submodules
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.training.setup import TrainingSetup

Prompts = Sequence[Sequence[int]]
SEED_STRIDE = 1009  # between the seeds of two batches; the rows of a batch lie between


class Answerer(Protocol):
    """Answers prompts (token ids) with the backbone alone. name: how it decodes, kept with the
    answers. ends: ids of the tokens that end an answer."""

    name: str
    ends: tuple[int, ...]

    def answer(
        self, prompts: Prompts, temperature: float, most: int, seed: int, skip: int = 0
    ) -> Iterator[list[int]]:
        """For each prompt but the first `skip` an answer of at most `most` token ids, its end token
        included, as they come. The same seed gives the same answers, whatever is skipped."""
        ...


def fastest_answerer(model: Any, context: int, ends: Sequence[int]) -> Answerer:
    """The faster answerer for this model, for texts of at most `context` tokens: our engine where
    the pass is one call into C, which keeps an answer as soon as it has ended (SmolLM2 135M, 16
    answers of up to 512 tokens, two cores with AVX-512: 104 tokens/s in bf16 and 65 in fp32, where
    a batch of 16 gave 81 and 87); otherwise batches, since a row costs little beside the weights
    that every step reads."""
    if native.can_run(model) and native_build.library() is not None:
        return EngineAnswerer(model, context, ends)
    return BatchAnswerer(model, ends)


class EngineAnswerer:
    """Our engine with plain decoding, one prompt after another. It is built at the first prompt,
    from a copy of the model that shares the weights: the model's own submodules must stay as they
    are to be trained."""

    name = "our engine"

    def __init__(self, model: Any, context: int, ends: Sequence[int]) -> None:
        self.ends = tuple(ends)
        self._model, self._context = model, context
        self._engine: Engine | None = None

    def answer(
        self, prompts: Prompts, temperature: float, most: int, seed: int, skip: int = 0
    ) -> Iterator[list[int]]:
        self._engine = self._engine or self._build()
        for row in range(skip, len(prompts)):
            settings = GenerationSettings(
                drafter="none",
                temperature=temperature,
                max_new_tokens=most,
                seed=(seed * SEED_STRIDE + row) % 2**63,
            )
            with cpu_threads.one_for_torch():
                tokens = self._tokens(self._engine, prompts[row], settings)
                found = _until_end(tokens, self.ends)
            yield found

    def _build(self) -> Engine:
        library = native_build.library()
        assert library is not None
        shared = {id(p): p for p in self._model.parameters()}
        copied = deepcopy(self._model, shared).eval()
        replace_submodules(copied, packs=False)
        backbone = Backbone(copied, self._context, numbers=native.NUMBERS)
        team = native.NativeThreads(library, cpu_threads.of_native(copied))
        # a backbone for which our C gives other numbers than torch is left to torch
        return Engine(native.native_step(backbone, None, team) or TorchStep(backbone))

    @staticmethod
    def _tokens(
        engine: Engine, prompt: Sequence[int], settings: GenerationSettings
    ) -> Iterator[int]:
        """The engine has no end tokens, so that the one that ended the answer is part of it."""
        drafter = engine.drafter(settings, tree=ROOT)
        for event in engine.generate(prompt, drafter, settings, details=False):
            if not isinstance(event, Finished):
                yield from event.token_ids
            elif event.reason == "error":
                raise MedusaChatError(event.message)


class BatchAnswerer:
    """transformers' `generate`, all prompts of a batch at once."""

    name = "batches"

    def __init__(self, model: Any, ends: Sequence[int]) -> None:
        self.model = model
        self.ends = tuple(ends)

    def answer(
        self, prompts: Prompts, temperature: float, most: int, seed: int, skip: int = 0
    ) -> Iterator[list[int]]:
        model, width = self.model, max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.ends[0])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with _plain_generation(model), torch.inference_mode():
            torch.manual_seed(seed)
            output = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=most,
                eos_token_id=list(self.ends),
                pad_token_id=self.ends[0],
                **(sampling if temperature else {"do_sample": False}),
            )
        for row in output[skip:, width:].tolist():
            yield _until_end(row, self.ends)


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """The model without what its generation config does to the logits (a repetition penalty,
    min-p, ...), which our engine does not do either; the random state is restored afterwards."""
    devices = [model.device.index or 0] if model.device.type == "cuda" else []
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        model.generation_config = kept


def answerer_of(setup: TrainingSetup) -> Answerer:
    """The faster answerer for the backbone of a training. Raises UsageError without end tokens."""
    ends = require_ends(setup.model, setup.tokenizer)
    return fastest_answerer(setup.model, setup.length, ends)


def require_ends(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids of the tokens that end a turn, those of the chat included. Raises UsageError when there
    is none."""
    ends = tuple(sorted(end_tokens(model, tokenizer)))
    if not ends:
        raise UsageError(
            "the backbone has no end token: set eos_token_id in its generation_config.json"
        )
    return ends


def _until_end(ids: Iterator[int] | Sequence[int], ends: Sequence[int]) -> list[int]:
    found = []
    for token in ids:
        found.append(token)
        if token in ends:
            break
    return found
