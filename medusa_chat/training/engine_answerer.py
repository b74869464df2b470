"""EngineAnswerer: answers decoded side by side in C, a row of each pass for every one."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medusa_chat.checkpoints import native_build
from medusa_chat.decoding.answer import BROKEN
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import cpu_threads, native
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.draft import Autoregressive
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import Prefilled
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError

SEED_STRIDE = 1009  # between the seeds of two batches; the rows of a batch lie between


@dataclass(frozen=True)
class PromptBatch:
    """Prompts (token ids). temperature: 0 is greedy."""

    prompts: Sequence[Sequence[int]]
    temperature: float
    seed: int

    def seed_of(self, row: int) -> int:
        """The seed of one prompt alone, where each has its own."""
        return (self.seed * SEED_STRIDE + row) % 2**63


# answers side by side; of SmolLM2 135M in bf16, two cores with AVX-512 give 3.9 times one answer's
# tokens/s with 8, 4.7 times with 32
ROWS = 32
MOST_BYTES = 2**31  # that their keys and values may take
GREEDY = -1  # instead of a place in the text: no noise


@dataclass
class Request:
    """A prompt and how it is answered. settings: with the seed; its most tokens fit the context.
    found: of the answer, so far; slot: of its text."""

    index: int
    prompt: Sequence[int]
    settings: GenerationSettings
    found: list[int] = field(default_factory=list)
    slot: int = 0

    @property
    def length(self) -> int:
        """Tokens of the whole text, the most that it may have."""
        return len(self.prompt) + self.settings.max_new_tokens

    @property
    def place(self) -> int:
        """The position of its last token, which the next pass reads."""
        return len(self.prompt) + len(self.found) - 1

    def has_ended(self, ends: Sequence[int]) -> bool:
        """Whether its last token is the last one of the answer."""
        return self.found[-1] in ends or len(self.found) == self.settings.max_new_tokens


class EngineAnswerer:
    """Plain decoding of many answers at once: token for token what our engine gives alone. Prompts
    are read one by one, by the engine; when an answer ends, the next prompt takes its place."""

    name = "our engine"

    def __init__(self, step: native.NativeStep, ends: Sequence[int], rows: int = ROWS) -> None:
        """rows: most answers side by side."""
        self.ends, self._rows = tuple(ends), rows
        self._engine, self._step = Engine(step), step
        self._drafter = Autoregressive(torch.device("cpu"))

    def answer(
        self, batches: Sequence[PromptBatch], most: int, skip: int = 0
    ) -> Iterator[list[int]]:
        """See Answerer. An answer comes as soon as it and all before it have ended."""
        queue = self._requests(batches, most)[skip:]
        ended: dict[int, list[int]] = {}
        for request in self._in_any_order(queue):
            ended[request.index] = request.found
            while skip in ended:
                yield ended.pop(skip)
                skip += 1

    def _requests(self, batches: Sequence[PromptBatch], most: int) -> list[Request]:
        context, found = self._step.backbone.context, []
        for batch in batches:
            for row, prompt in enumerate(batch.prompts):
                settings = GenerationSettings(
                    temperature=batch.temperature,
                    max_new_tokens=max(min(most, context - len(prompt)), 1),
                    seed=batch.seed_of(row),
                )
                found.append(Request(len(found), prompt, settings))
        return found

    def _in_any_order(self, queue: Sequence[Request]) -> Iterator[Request]:
        """The requests, answered, as they end. Nothing of torch is changed while it waits."""
        if not queue:
            return
        slots, texts = self._room(queue)
        free, waiting, running = list(range(slots)), list(reversed(queue)), list[Request]()
        while waiting or running:
            with cpu_threads.of_torch(1), torch.inference_mode():
                while free and waiting:
                    running.append(self._begin(waiting.pop(), free.pop(), texts))
                going = [one for one in running if not one.has_ended(self.ends)]
                if going:
                    self._decode_step(going, texts)
            ended = [one for one in running if one.has_ended(self.ends)]
            running = [one for one in running if not one.has_ended(self.ends)]
            free += [one.slot for one in ended]
            yield from ended

    def _room(self, queue: Sequence[Request]) -> tuple[int, native.NativeTexts]:
        """As many slots as there are texts and memory for, each of the longest text's length."""
        decoder = self._step.decoder
        capacity = max(one.length for one in queue)
        fitting = MOST_BYTES // native.NativeTexts.bytes_of(decoder, capacity)
        slots = max(min(self._rows, len(queue), fitting), 1)
        return slots, native.NativeTexts(decoder, slots, capacity)

    def _begin(self, request: Request, slot: int, texts: native.NativeTexts) -> Request:
        """Read the prompt and put it into the slot, with the answer's first token."""
        events = self._engine.generate(request.prompt, self._drafter, request.settings, False)
        request.found += next(e for e in events if isinstance(e, Prefilled)).token_ids
        events.close()
        if not request.found:
            raise MedusaChatError(BROKEN)
        texts.put(slot, self._step.backbone.cache)
        request.slot = slot
        return request

    def _decode_step(self, going: Sequence[Request], texts: native.NativeTexts) -> None:
        """Give each of the answers its next token."""
        places = torch.tensor([one.place for one in going])
        tokens = torch.tensor([one.found[-1] for one in going])
        hidden = texts.run(tokens, places, torch.tensor([one.slot for one in going]))
        logits = self._step.backbone.lm_head(hidden)
        require_finite(logits)
        for one, token in zip(going, self._drawn(going, logits, places).tolist(), strict=True):
            one.found.append(token)

    def _drawn(self, going: Sequence[Request], logits: Tensor, places: Tensor) -> Tensor:
        """The next tokens int64 [n] by logits [n, V] behind `places`: see acceptance.own_tokens."""
        is_greedy = torch.tensor([one.settings.is_greedy for one in going])
        if is_greedy.all():
            return self._step.rows.largest(logits)
        scales = torch.tensor([one.settings.scale for one in going])
        seeds = torch.tensor([one.settings.seed for one in going])
        scores = logits.float() / scales[:, None]
        return self._step.rows.draw_each(scores, (places + 1).masked_fill(is_greedy, GREEDY), seeds)


def native_step(model: Any, context: int) -> native.NativeStep | None:
    """Steps in C over texts of at most `context` tokens, of a copy of the model that shares the
    weights: its own submodules must stay as they are to be trained. None where C gives other
    numbers than torch."""
    library = native_build.library()
    assert library is not None
    shared = {id(p): p for p in model.parameters()}
    copied = deepcopy(model, shared).eval()
    threads = native.NativeThreads(library, cpu_threads.of_native(copied))
    lay_out = native.layout(copied, threads)
    if lay_out is None:
        return None
    replace_submodules(copied, packs=False, lay_out=lay_out)
    return native.native_step(Backbone(copied, context), None, threads)


def require_finite(logits: Tensor) -> None:
    """Raises MedusaChatError where the largest of a row of logits [n, V], of any
    floating dtype, is not finite."""
    if not logits.amax(-1).isfinite().all():
        raise MedusaChatError(BROKEN)
