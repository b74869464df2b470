"""Answerers: what makes a backbone's own answers. Our engine where it is faster, else batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Protocol

import torch

from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.load import end_tokens
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import cpu_threads, native
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.fused_layers import replace_submodules
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.errors import MedusaChatError, UsageError

Prompts = Sequence[Sequence[int]]
SEEDS_APART = 1009  # of a batch's rows and the next batch's


class Answerer(Protocol):
    """Answers prompts (token ids) with the backbone alone. name: of the way it does. ends: the
    tokens that end an answer."""

    name: str
    ends: tuple[int, ...]

    def answer(self, prompts: Prompts, temperature: float, most: int, seed: int) -> list[list[int]]:
        """An answer of at most `most` token ids to each, its end token included where it has one.
        The same seed gives the same answers."""
        ...


def answerer(model: Any, context: int, ends: Sequence[int]) -> Answerer:
    """Who answers fastest with this model, in texts of at most `context` tokens: our engine where
    a step is one call into C, which beats batches of 16 there several times; elsewhere batches,
    since a row costs little beside the weights that every step reads."""
    if native.can_run(model) and native.is_small(model) and native_build.library() is not None:
        return OneByOne(model, context, ends)
    return Batches(model, ends)


class OneByOne:
    """Our engine, plain decoding, one prompt after the other. It is built at the first of them,
    beside the model, whose own submodules are still to learn: it shares the weights and holds
    layouts of its own."""

    name = "our engine"

    def __init__(self, model: Any, context: int, ends: Sequence[int]) -> None:
        self.ends = tuple(ends)
        self._model, self._context = model, context
        self._engine: Engine | None = None

    def answer(self, prompts: Prompts, temperature: float, most: int, seed: int) -> list[list[int]]:
        self._engine = self._engine or self._built()
        answers = []
        for row, prompt in enumerate(prompts):
            settings = GenerationSettings(
                drafter="none",
                temperature=temperature,
                max_new_tokens=most,
                seed=(seed * SEEDS_APART + row) % 2**63,
            )
            answers.append(_until_end(self._tokens(self._engine, prompt, settings), self.ends))
        return answers

    def _built(self) -> Engine:
        library = native_build.library()
        assert library is not None
        shared = {id(p): p for p in self._model.parameters()}
        copied = deepcopy(self._model, shared).eval()
        replace_submodules(copied, packs=False)
        backbone = Backbone(copied, self._context, numbers=native.NUMBERS)
        # where the numbers are not the twin's, the twin answers
        native.enable(backbone, None, native.NativeThreads(library, cpu_threads.of_native(copied)))
        engine = Engine(backbone)
        engine.pauses = frozenset(self.ends)
        return engine

    @staticmethod
    def _tokens(
        engine: Engine, prompt: Sequence[int], settings: GenerationSettings
    ) -> Iterator[int]:
        """The engine knows of no end, so that which one it was can be kept."""
        drafter = engine.drafter(settings, tree=ROOT)
        for event in engine.generate(prompt, drafter, settings, details=False):
            if not isinstance(event, Finished):
                yield from event.token_ids
            elif event.reason == "error":
                raise MedusaChatError(event.message)


class Batches:
    """transformers' generate, all prompts at once."""

    name = "batches"

    def __init__(self, model: Any, ends: Sequence[int]) -> None:
        self.model = model
        self.ends = tuple(ends)

    def answer(self, prompts: Prompts, temperature: float, most: int, seed: int) -> list[list[int]]:
        model, width = self.model, max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.ends[0])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with _as_it_is(model), torch.inference_mode():
            torch.manual_seed(seed)
            output = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=most,
                eos_token_id=list(self.ends),
                pad_token_id=self.ends[0],
                **(sampling if temperature else {"do_sample": False}),
            )
        return [_until_end(row, self.ends) for row in output[:, width:].tolist()]


@contextmanager
def _as_it_is(model: Any) -> Iterator[None]:
    """Without what its generation config does to the logits (a repetition penalty, min-p, ...),
    which no decoding of ours does; the random state is put back behind it."""
    from transformers import GenerationConfig

    devices = [model.device.index or 0] if model.device.type == "cuda" else []
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        model.generation_config = kept


def require_ends(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a turn in the chat as well. Raises UsageError when there is none."""
    ends = tuple(sorted(end_tokens(model, tokenizer)))
    if not ends:
        raise UsageError("the backbone names no end token (eos_token_id in generation_config.json)")
    return ends


def _until_end(ids: Iterator[int] | Sequence[int], ends: Sequence[int]) -> list[int]:
    found = []
    for token in ids:
        found.append(token)
        if token in ends:
            break
    return found
