"""Answerers: they decode the backbone's own answers to many prompts at once.

Plain decoding alone: typical acceptance would bias the answers (Medusa, arXiv 2401.10774, 2.3.2).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from medusa_chat.checkpoints import devices, native_build
from medusa_chat.checkpoints.devices import device_memory, held_bytes
from medusa_chat.checkpoints.model_sizes import short_length
from medusa_chat.checkpoints.turn_ends import end_tokens
from medusa_chat.decoding.answer import BROKEN
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import native_step
from medusa_chat.decoding.backends.native_layers import layer_packer
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_step import NativeStep, NativeTexts
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.kv_cache import layer_shapes
from medusa_chat.decoding.probe import common_prefix
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.training.packed_model import KeptStates, PackedModel
from medusa_chat.training.setup import TrainingSetup

BATCH_ROWS, MOST_BATCH_ROWS = 16, 512  # prompts of a batch
SEED_STRIDE = 1009  # between the seeds of two batches; those of a batch's rows lie between
# Answers that are decoded side by side in C. SmolLM2 135M in bf16 on two cores with AVX-512: 8 give
# 3.9 times the tokens/s of one, 32 give 4.7 times.
NATIVE_ROWS = 32
MOST_BYTES = 2**31  # of their keys and values
NO_NOISE = -1  # in place of a position: the largest logit is taken


@dataclass(frozen=True)
class PromptBatch:
    """Prompts (token ids) that are answered together. temperature: 0 is greedy."""

    prompts: Sequence[Sequence[int]]
    temperature: float
    seed: int

    def seed_of(self, row: int) -> int:
        """The seed of one prompt, for an answerer that samples each by a seed of its own."""
        return (self.seed * SEED_STRIDE + row) % 2**63


class Answerer(Protocol):
    """Answers prompts with the backbone alone. name: how it decodes; it is kept with the answers.
    ends: ids of the tokens that end an answer."""

    name: str
    ends: tuple[int, ...]

    def answer(
        self, batches: Sequence[PromptBatch], most: int, skip: int = 0
    ) -> Iterator[list[int]]:
        """The answers to all prompts but the first `skip`, in order, as they come: at most `most`
        token ids each, the end token included. The same seeds give the same answers, whatever is
        skipped."""


def answerer_of(setup: TrainingSetup) -> Answerer:
    """The fastest answerer for the backbone of a training. Raises UsageError: see turn_ends."""
    return fastest_answerer(setup.model, setup.length, turn_ends(setup))


def turn_ends(setup: TrainingSetup) -> list[int]:
    """The tokens that end an answer of the backbone: all that end a turn. Raises UsageError where
    there is none."""
    ends = sorted(end_tokens(setup.model, setup.tokenizer))
    if not ends:
        raise UsageError(
            "the backbone has no end token: set eos_token_id in its generation_config.json"
        )
    return ends


def fastest_answerer(model: Any, context: int, ends: Sequence[int]) -> Answerer:
    """The fastest answerer for texts of at most `context` tokens: the C library where it runs the
    whole model, otherwise batches. Both decode many answers at once, since a row costs little
    beside the weights, which every step reads."""
    if isinstance(model, PackedModel):
        return NativeAnswerer(model.step, ends, kept=model.kept)
    config = model.config.get_text_config()
    # with longrope's factors of the passes that train
    fits = context <= (short_length(config.to_dict()) or context)
    has_pass = native_step.can_run(model) and fits and native_build.library() is not None
    step = attached_native(model, context) if has_pass else None
    return BatchAnswerer(model, ends) if step is None else NativeAnswerer(step, ends)


def batch_rows(setup: TrainingSetup) -> int:
    """Prompts of a batch. On a GPU, where a row costs little, as many as fit into half of the
    memory beside the model; keys and values are held twice while they grow."""
    if setup.device.type == "cpu":
        return BATCH_ROWS
    shapes = layer_shapes(setup.model.get_decoder(), setup.config.get_text_config(), setup.device)
    token = sum(shape.heads * shape.width for shape in shapes) * setup.model.dtype.itemsize
    room = device_memory(setup.device).total - held_bytes(setup.model)
    return max(BATCH_ROWS, min(MOST_BATCH_ROWS, room // 2 // (2 * token * setup.length)))


# ---------------------------------------------------------------------- batches, by transformers


class BatchAnswerer:
    """transformers' `generate`, all prompts of a batch at once."""

    name = "batches"

    def __init__(self, model: Any, ends: Sequence[int]) -> None:
        self.model = model
        self.ends = tuple(ends)

    def answer(
        self, batches: Sequence[PromptBatch], most: int, skip: int = 0
    ) -> Iterator[list[int]]:
        """See Answerer. A batch is decoded whole, since its rows share a random state."""
        for batch in batches:
            count = len(batch.prompts)
            if skip < count:
                yield from self._answer_batch(batch, most)[skip:]
            skip = max(skip - count, 0)

    def _answer_batch(self, batch: PromptBatch, most: int) -> list[list[int]]:
        model, width = self.model, max(map(len, batch.prompts))
        ids = torch.full((len(batch.prompts), width), self.ends[0])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch.prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        sampling = {"do_sample": True, "temperature": batch.temperature, "top_k": 0, "top_p": 1.0}
        with _plain_generation(model), torch.inference_mode():
            torch.manual_seed(batch.seed)
            output = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=most,
                eos_token_id=list(self.ends),
                pad_token_id=self.ends[0],
                logits_processor=LogitsProcessorList([_finite]),
                **(sampling if batch.temperature else {"do_sample": False}),
            )
        return [_until_end(row, self.ends) for row in output[:, width:].tolist()]


def _finite(_: Tensor, logits: Tensor) -> Tensor:
    """A logits processor that changes nothing."""
    require_finite(logits)
    return logits


def require_finite(logits: Tensor) -> None:
    """Raises MedusaChatError where the largest of a row of logits [n, V] is not finite."""
    if not logits.amax(-1).isfinite().all():
        raise MedusaChatError(BROKEN)


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: end + 1]


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """The model without what its generation config does to the logits (a repetition penalty,
    min-p, ...), which our engine does not do either; the random state is restored afterwards."""
    gpus = [model.device.index or 0] if model.device.type == "cuda" else []
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        model.generation_config = kept


# ---------------------------------------------------------------- many texts at once, by the C pass


@dataclass
class Request:
    """A prompt and its answer so far. index: its place among all prompts; slot: its text's place
    among those that are decoded side by side; states: the one [d] before each token of the answer,
    where they are kept."""

    index: int
    prompt: Sequence[int]
    settings: GenerationSettings
    answer: list[int] = field(default_factory=list)
    slot: int = 0
    states: list[Tensor] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        """The position of the last token, which the next pass reads."""
        return len(self.prompt) + len(self.answer) - 1

    def has_ended(self, ends: Sequence[int]) -> bool:
        return self.answer[-1] in ends or len(self.answer) == self.settings.max_new_tokens


class NativeAnswerer:
    """Plain decoding of many answers at once, in C: token for token what the engine gives for one.
    Prompts are read one by one; when an answer ends, the next prompt takes its place."""

    name = "our engine"

    def __init__(
        self,
        step: NativeStep,
        ends: Sequence[int],
        rows: int = NATIVE_ROWS,
        kept: KeptStates | None = None,
    ) -> None:
        """rows: most answers side by side. kept: where their hidden states go, in bf16."""
        self.ends, self._rows, self._step, self._kept = tuple(ends), rows, step, kept
        if kept is not None:
            self.name = "our engine, the file as it is"  # other answers than of the unpacked one
        self._cached: Sequence[int] = ()  # the prompt whose keys and values the cache holds

    def answer(
        self, batches: Sequence[PromptBatch], most: int, skip: int = 0
    ) -> Iterator[list[int]]:
        """See Answerer. An answer comes as soon as it and all before it have ended."""
        ended: dict[int, list[int]] = {}
        for request in self._in_any_order(self._requests(batches, most)[skip:]):
            ended[request.index] = request.answer
            if self._kept is not None:
                text = tuple(request.prompt), tuple(request.answer)
                self._kept.put(*text, torch.stack(request.states))
                request.states.clear()
            while skip in ended:
                yield ended.pop(skip)
                skip += 1

    def _requests(self, batches: Sequence[PromptBatch], most: int) -> list[Request]:
        context, requests = self._step.backbone.context, list[Request]()
        for batch in batches:
            for row, prompt in enumerate(batch.prompts):
                settings = GenerationSettings(
                    temperature=batch.temperature,
                    max_new_tokens=max(min(most, context - len(prompt)), 1),
                    seed=batch.seed_of(row),
                )
                requests.append(Request(len(requests), prompt, settings))
        return requests

    def _in_any_order(self, requests: Sequence[Request]) -> Iterator[Request]:
        """The requests as they end. While it waits for its reader, torch's settings are as they
        were."""
        if not requests:
            return
        free, texts = self._slots(requests)
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            with devices.torch_threads(1), torch.inference_mode():
                while free and waiting:
                    running.append(self._begin(waiting.popleft(), free.pop(), texts))
                going = [one for one in running if not one.has_ended(self.ends)]
                if going:
                    self._decode_step(going, texts)
            ended = [one for one in running if one.has_ended(self.ends)]
            running = [one for one in running if not one.has_ended(self.ends)]
            free += [one.slot for one in ended]
            yield from ended

    def _slots(self, requests: Sequence[Request]) -> tuple[list[int], NativeTexts]:
        """As many slots as there are texts and memory for, each as long as the longest text."""
        decoder = self._step.decoder
        capacity = max(len(one.prompt) + one.settings.max_new_tokens for one in requests)
        fitting = MOST_BYTES // NativeTexts.bytes_of(decoder, capacity)
        count = max(min(self._rows, len(requests), fitting), 1)
        return list(range(count)), NativeTexts(decoder, count, capacity)

    def _begin(self, request: Request, slot: int, texts: NativeTexts) -> Request:
        """Read the prompt into the slot and draw the answer's first token."""
        backbone, prompt = self._step.backbone, request.prompt
        reused = min(common_prefix(self._cached, prompt), len(prompt) - 1)
        backbone.cache.crop(reused)
        self._cached = prompt
        for part in torch.tensor(prompt[reused:]).split(backbone.chunk):
            hidden = backbone.run_chunk(part)
        texts.put(slot, backbone.cache)
        request.slot = slot
        self._extend([request], hidden[-1:])
        return request

    def _decode_step(self, going: Sequence[Request], texts: NativeTexts) -> None:
        """Give each of the answers its next token."""
        tokens = torch.tensor([one.answer[-1] for one in going])
        positions = torch.tensor([one.last_position for one in going])
        hidden = texts.run(tokens, positions, torch.tensor([one.slot for one in going]))
        self._extend(going, hidden)

    def _extend(self, going: Sequence[Request], hidden: Tensor) -> None:
        """Draw the next token of each by hidden [n, d] as the engine does (acceptance.exact)."""
        logits, rows = self._step.backbone.lm_head(hidden), self._step.rows
        require_finite(logits)
        settings = [one.settings for one in going]
        is_greedy = torch.tensor([one.is_greedy for one in settings])
        if is_greedy.all():
            drawn = rows.largest(logits)
        else:
            scores = logits.float() / torch.tensor([one.scale for one in settings])[:, None]
            positions = torch.tensor([one.last_position + 1 for one in going])
            seeds = torch.tensor([one.seed for one in settings])
            drawn = rows.draw_each(scores, positions.masked_fill(is_greedy, NO_NOISE), seeds)
        for one, token in zip(going, drawn.tolist(), strict=True):
            one.answer.append(token)
        if self._kept is not None:
            for one, state in zip(going, hidden.bfloat16(), strict=True):
                one.states.append(state)


def attached_native(model: Any, context: int) -> NativeStep | None:
    """Steps in C over texts of at most `context` tokens, of a copy of the model that shares the
    weights: its own submodules must stay as they are to be trained. None where C gives other
    numbers than torch."""
    library = native_build.library()
    assert library is not None
    shared = {id(p): p for p in model.parameters()}
    copied = deepcopy(model, shared).eval()
    native = NativeLibrary(library, devices.native_threads(copied))
    pack_layer = layer_packer(copied, native)
    if pack_layer is None:
        return None
    replace_submodules(copied, packs=False, pack_layer=pack_layer)
    return native_step.attach(Backbone(copied, context), None, native)
