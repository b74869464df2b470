"""Answerers: a backbone's own answers to prompts, by our engine or by transformers in batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.memory import device_memory, held_bytes
from medusa_chat.checkpoints.turn_ends import end_tokens
from medusa_chat.checkpoints.usual_context import short_length
from medusa_chat.decoding.backends import native
from medusa_chat.decoding.families import windows
from medusa_chat.decoding.kv_cache import layer_shapes
from medusa_chat.errors import UsageError
from medusa_chat.training.engine_answerer import (
    EngineAnswerer,
    PromptBatch,
    native_step,
    require_finite,
)
from medusa_chat.training.setup import TrainingSetup

ROWS, MOST_ROWS = 16, 512  # prompts of a batch


class Answerer(Protocol):
    """Answers prompts (token ids) with the backbone alone. name: how it decodes, kept with the
    answers. ends: ids of the tokens that end an answer."""

    name: str
    ends: tuple[int, ...]

    def answer(
        self, batches: Sequence[PromptBatch], most: int, skip: int = 0
    ) -> Iterator[list[int]]:
        """For each prompt but the first `skip` an answer of at most `most` token ids, its end token
        included, in their order, as they come. The same seeds give the same answers, whatever is
        skipped."""


def fastest_answerer(model: Any, context: int, ends: Sequence[int]) -> Answerer:
    """The faster answerer for this model, for texts of at most `context` tokens: our engine where
    the pass is one call into C; otherwise batches. Both decode many answers at once, since a row
    costs little beside the weights that every step reads."""
    config = model.config.get_text_config()
    width = windows(config)[0] or context
    short = short_length(config.to_dict()) or context
    # a row sees its whole text there, with longrope's factors of the passes that train
    fits = context <= min(width, short)
    has_pass = native.can_run(model) and fits and native_build.library() is not None
    step = native_step(model, context) if has_pass else None
    return BatchAnswerer(model, ends) if step is None else EngineAnswerer(step, ends)


class BatchAnswerer:
    """transformers' `generate`, all prompts of a batch at once."""

    name = "batches"

    def __init__(self, model: Any, ends: Sequence[int]) -> None:
        self.model = model
        self.ends = tuple(ends)

    def answer(
        self, batches: Sequence[PromptBatch], most: int, skip: int = 0
    ) -> Iterator[list[int]]:
        """See Answerer."""
        for batch in batches:
            count = len(batch.prompts)
            if skip < count:
                yield from self._answer_batch(batch, most)[skip:]
            skip = max(skip - count, 0)

    def _answer_batch(self, batch: PromptBatch, most: int) -> list[list[int]]:
        prompts, temperature = batch.prompts, batch.temperature
        model, width = self.model, max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.ends[0])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with _plain_generation(model), torch.inference_mode():
            torch.manual_seed(batch.seed)
            output = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=most,
                eos_token_id=list(self.ends),
                pad_token_id=self.ends[0],
                logits_processor=LogitsProcessorList([_Finite()]),
                **(sampling if temperature else {"do_sample": False}),
            )
        return [_until_end(row, self.ends) for row in output[:, width:].tolist()]


class _Finite(LogitsProcessor):
    """Lets logits be, and raises MedusaChatError for those that are no numbers."""

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:
        require_finite(scores)
        found: Tensor = scores
        return found


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


def rows_of(setup: TrainingSetup) -> int:
    """Prompts of a batch: on a GPU, where a row costs little, as many as fit into half of the
    memory that the model leaves, their keys and values held twice as they grow."""
    if setup.device.type == "cpu":
        return ROWS
    shapes = layer_shapes(setup.model.get_decoder(), setup.config.get_text_config(), setup.device)
    token = sum(shape.heads * shape.width for shape in shapes) * setup.model.dtype.itemsize
    room = device_memory(setup.device).total - held_bytes(setup.model)
    return max(ROWS, min(MOST_ROWS, room // 2 // (2 * token * setup.length)))


def answerer_of(setup: TrainingSetup) -> Answerer:
    """The faster answerer for the backbone of a training, which ends at the tokens that end a turn,
    those of the chat included. Raises UsageError without any."""
    ends = sorted(end_tokens(setup.model, setup.tokenizer))
    if not ends:
        raise UsageError(
            "the backbone has no end token: set eos_token_id in its generation_config.json"
        )
    return fastest_answerer(setup.model, setup.length, ends)


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: end + 1]
