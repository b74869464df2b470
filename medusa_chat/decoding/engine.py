"""Engine: prefill, step, stop. One text at a time, as a generator of events."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import ACCEPTANCE, VerifyInput
from medusa_chat.decoding.answer import Answer, busy_clock
from medusa_chat.decoding.budget import Budget, StepTimes
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.decoding.draft import Draft, Plan, TreeTensors
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.drafter import Drafter, Drafting, Features
from medusa_chat.decoding.drafters.kinds import Kind
from medusa_chat.decoding.drafters.lookup import Autoregressive, PromptLookup
from medusa_chat.decoding.drafters.medusa import Medusa
from medusa_chat.decoding.drafters.tree_drafting import TreeDrafting
from medusa_chat.decoding.events import Prefilled, Reading, Reason, Told
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.penalties import Penalties
from medusa_chat.decoding.probe import common_prefix, probe_logits
from medusa_chat.decoding.reasoning import Part, ReasoningReader
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import DecodeState, StepBackend, StepResult, read
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ContextError, UsageError

WORTH = 64  # least tokens of a text that is set aside for another's turn
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Engine:
    """Decodes with a backbone and what drafts for it: Medusa heads, a drafter that follows the
    text, or neither.

    Between answers it keeps the KV cache and its exact token ids, so that a prompt that starts like
    the last text is prefilled only from their first difference; while the cache has room for it,
    the text before that too, so that two conversations may take turns. Closing the iterator that
    `generate` returns cancels the answer; the cache stays valid.
    """

    def __init__(
        self,
        backend: StepBackend,
        heads: MedusaHeads | None = None,
        eos: frozenset[int] = frozenset(),
        drafter: Drafter | None = None,
    ) -> None:
        """backend: runs the steps, on its backbone. eos: ids of the tokens that end an answer.
        drafter: one that follows the text beside the backbone."""
        self.backend, self.backbone = backend, backend.backbone
        self.heads = heads
        self.follower: Drafter | None = None  # beside the backbone, told of the text
        self.eos = eos
        self.name = ""
        self.precision = PRECISIONS.get(self.backbone.dtype, str(self.backbone.dtype))
        self.times: StepTimes | None = None  # learns from every step
        self._busy = busy_clock(self.backbone.device)
        self._ids: list[int] = []  # what the cache holds
        self._aside: list[int] = []  # what it was to set aside
        self._following: Drafter | None = None  # that drafts the current answer
        if drafter is not None:
            self.follow(drafter)

    def follow(self, drafter: Drafter) -> None:
        """Tell this drafter of the text from now on."""
        self.follower = drafter
        self.forget()
        if drafter.taps:
            self.backbone.tap(drafter.taps)

    def drafter(
        self,
        settings: GenerationSettings,
        tree: Tree,
        budget: Budget | None = None,
        kind: Kind | None = None,
    ) -> Drafting:
        """What drafts an answer with resolved settings. Raises UsageError for a kind that the model
        does not have.

        tree: that heads fill. budget: decides how much is drafted at each step. kind: which one
        drafts for "auto"; None for the heads.
        """
        device = self.backbone.device
        if settings.drafter == kinds.NONE.name:
            return Autoregressive(device)
        nodes = settings.nodes or len(tree)
        if settings.drafter == kinds.LOOKUP.name:
            return PromptLookup(nodes, device, budget)
        reads_text = settings.drafter in (None, kinds.AUTO)
        kind = kind or (kinds.MEDUSA if reads_text else kinds.BY_NAME[settings.drafter or ""])
        if kind is not kinds.MEDUSA:
            if self.follower is None or self.follower.kind is not kind:
                raise UsageError(kind.missing)
            return TreeDrafting(self.follower, device, ROOT, nodes, budget, reads_text)
        if self.heads is None:
            raise UsageError(kind.missing)
        heads = Medusa(self.heads, self.backbone.lm_head, self.backbone.vocabulary)
        is_recorded = self.backend.tries > 0
        return TreeDrafting(heads, device, tree, None, budget, reads_text, is_recorded)

    def forget(self) -> None:
        """Empty the cache, so that the next prompt is prefilled whole."""
        self._crop(0)
        self.backbone.cache.aside = 0

    def generate(
        self,
        prompt_ids: Sequence[int],
        drafter: Drafting,
        settings: GenerationSettings,
        details: bool = True,
        texts: TokenTexts | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        reader: ReasoningReader | None = None,
        logprobs: int | None = None,
        begun: Sequence[int] = (),
    ) -> Generator[Told, None, None]:
        """Decode after `prompt_ids`. settings: resolved, with a seed where it samples.

        details: whether each step records its draft with probabilities. texts: of tokens; without
        them all text is "", and no stop string ends the answer. should_stop: checked after every
        event; ends the answer as "cancelled". reader: of reasoning. logprobs: the number of
        alternatives for each token's log probability; None: no logprobs. begun: the prompt's last
        tokens, where they begin the answer: their text comes first. A long prompt yields Readings.
        Raises ContextError for one that leaves no room, UsageError for an empty one.
        """
        self._require_room(prompt_ids)
        started = perf_counter()
        limit, rows = self._limit(len(prompt_ids), settings), self.backend.rows
        answer = Answer(self.eos, *limit, texts, settings.stop, reader, logprobs, rows)
        self._following = drafter.drafter
        reused, chunk = self._reuse(prompt_ids), self.backbone.chunk
        while len(prompt_ids) - len(self._ids) > chunk:
            self._read(prompt_ids[len(self._ids) :][:chunk])
            yield Reading(len(self._ids), len(prompt_ids))
            if should_stop():
                answer.reason = "cancelled"
                yield answer.finished()
                return
        penalties = Penalties(settings, prompt_ids) if settings.has_penalties else None
        first, hidden = self._prefill(prompt_ids, settings, penalties)
        ids, part = answer.begin(first, perf_counter() - started, begun)
        told = self._prefilled(prompt_ids, settings, reused, ids, part)
        yield replace(told, seconds=answer.prefill_seconds, logprobs=answer.logprobs(ids, first))
        known: Sequence[int] = [*prompt_ids, first.next_token]
        state = DecodeState(drafter, settings, details, hidden, first.next_token)
        state.keeps_logits, state.penalties = logprobs is not None, penalties
        state.keeps_states = self._following is not None and self._following.reads_states
        if penalties is not None:
            penalties.add([first.next_token])
        while answer.reason is None:
            if should_stop():
                answer.reason = "cancelled"
                break
            started, before_step = perf_counter(), self._busy()
            result, plan = self._step(state, known, answer.room)
            known = [*result.tokens[1:], result.next_token]
            if penalties is not None:
                penalties.add(known)
            busy, seconds = self._busy() - before_step, perf_counter() - started
            self._record(drafter, result, plan, seconds)
            yield answer.step(known, result, seconds, busy, plan.reason)
        if answer.reason == "error":
            self.backbone.cache.wipe()
        yield answer.finished()

    def peek(
        self, token_ids: Sequence[int], path: Sequence[int], head: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [V] of the backbone after `token_ids` and `path`, and of head `head` (from 1; 0:
        none) after `token_ids`, where a draft is made; both in the dtype of the LM head.

        Afterwards the cache is unchanged, or cropped to the common prefix if the text has too
        little in common with it. Raises UsageError for tokens, a length or a head that the model
        does not have.
        """
        self.backbone.cache.claim(len(token_ids) + len(path) - self.backbone.cache.length)
        try:
            return probe_logits(self.backbone, self.heads, self._ids, token_ids, path, head)
        finally:
            self._crop(self.backbone.cache.length)

    def _step(self, state: DecodeState, known: Sequence[int], room: int) -> tuple[StepResult, Plan]:
        """The next step, and its plan. known: the tokens since the last step (first the prompt),
        the root last. room: tokens that the answer may still have."""
        begun, state.most = perf_counter(), room
        cache, drafter = self.backbone.cache, state.drafting
        plan = drafter.plan(known, self.backbone.context - 1 - cache.length)
        planned = perf_counter() - begun
        cache.claim(self._most_rows)
        result = self.backend.step(state, plan)
        result.heads_seconds += planned
        if result.is_finite:
            self._ids += result.tokens
            self._observe(result.tokens, result.states, result.taps)
        drafter.learn(result.nodes, result.path)
        return result, plan

    def _record(self, drafter: Drafting, result: StepResult, plan: Plan, seconds: float) -> None:
        """Record how long a step took for the budgets; only in answers that have a budget, since
        steps of other answers run under other conditions."""
        budget: Budget | None = getattr(drafter, "budget", None)
        if self.times is None or budget is None:
            return
        drafting = result.heads_seconds
        self.times.record(result.nodes, seconds - drafting, drafting, plan.heads > 0)
        if budget.pass_cost is not None:
            budget.pass_cost.record(drafting, plan.passes, self.times.plain_seconds)

    def _prefilled(
        self,
        prompt_ids: Sequence[int],
        settings: GenerationSettings,
        reused: int,
        token_ids: tuple[int, ...],
        part: Part,
    ) -> Prefilled:
        """The first event, but for its time and log probabilities."""
        return Prefilled(
            model=self.name,
            precision=self.precision,
            device=str(self.backbone.device),
            settings=settings.to_json(),
            prompt_token_ids=tuple(prompt_ids),
            prompt_tokens=len(prompt_ids),
            reused_tokens=reused,
            token_ids=token_ids,
            text=part.text,
            reasoning=part.reasoning,
            seconds=0.0,
            context=self.backbone.context,
            backend=self.backend.name,
        )

    def _require_room(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise UsageError("the prompt is empty: type something")
        context = self.backbone.context
        if len(prompt_ids) >= context:
            raise ContextError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {context}: "
                "shorten it, start a new chat, or raise --max-context where the model allows it"
            )

    @property
    def _most_rows(self) -> int:
        """Rows that a step, and one that is launched before it is read, may write."""
        return 2 * (self.backbone.cache.capacity - self.backbone.context)

    @torch.inference_mode()
    def _reuse(self, prompt_ids: Sequence[int]) -> int:
        """Crop the cache to its common prefix with the prompt -> how many tokens are reused. Of the
        two texts that it may hold it takes the one that the prompt shares more with, and sets the
        other aside. What follows the text is told of it."""
        cache, aside = self.backbone.cache, self._aside
        shared = common_prefix(self._ids, prompt_ids)
        if cache.aside and common_prefix(aside, prompt_ids) > shared:
            cache.exchange()
            if self.follower is not None:  # it knows the other text alone
                self.follower.crop(common_prefix(self._ids, aside))
            self._ids, self._aside = aside, self._ids
        elif self._is_other(prompt_ids, shared):
            cache.set_aside()
            self._aside = self._ids
        reused = min(common_prefix(self._ids, prompt_ids), len(prompt_ids) - 1)
        following = self._following
        if following is not None and following.reads_states:  # of the rest it knows no states
            reused = min(reused, following.length)
        self._crop(reused)
        if following is not None and following.length < reused:
            following.observe(Features(prompt_ids[following.length : reused]))
        return reused

    def _is_other(self, prompt_ids: Sequence[int], shared: int) -> bool:
        """Whether the prompt is another conversation's and the cache has room for both: not one
        that is edited or answered again, which shares most of the text or ends in it."""
        held, cache = len(self._ids), self.backbone.cache
        is_other = 2 * shared < held and shared < len(prompt_ids) - 1 and held >= WORTH
        return is_other and held + len(prompt_ids) + self._most_rows <= cache.capacity

    def _crop(self, length: int) -> None:
        """Forget all but the first `length` tokens of the text, here and in what follows it."""
        self._ids = self._ids[:length]
        self.backbone.cache.crop(length)
        if self.follower is not None:
            self.follower.crop(length)

    def _observe(self, tokens: Sequence[int], states: Tensor | None, taps: Tensor | None) -> None:
        """Tell the drafter of this answer that tokens became text. states, taps: theirs."""
        if self._following is not None:
            kept = states if self._following.reads_states else None
            self._following.observe(Features(tokens, kept, taps))

    @torch.inference_mode()
    def _prefill(
        self, prompt_ids: Sequence[int], settings: GenerationSettings, penalties: Penalties | None
    ) -> tuple[StepResult, Tensor]:
        """Read the rest of the prompt into the cache -> (the first token's result, the hidden state
        [1, d] that predicted it)."""
        last = self._read(prompt_ids[len(self._ids) :])[-1:]
        root = torch.tensor(prompt_ids[-1:], device=self.backbone.device)
        draft = Draft(root, TreeTensors.of(ROOT, self.backbone.device))
        logits = self.backbone.lm_head(last)
        if penalties is not None:
            penalties.apply(logits, draft)
        place = len(prompt_ids) - 1
        given = VerifyInput(draft, logits, place, settings, False, self.backend.rows)
        result = read(draft, ACCEPTANCE[settings.acceptance](given))
        result.logits = logits
        if not result.is_finite:
            self.forget()  # the cache of a pass with NaN must not be reused
            self.backbone.cache.wipe()
        return result, last

    @torch.inference_mode()
    def _read(self, tokens: Sequence[int]) -> Tensor:
        """Read the next tokens of the text into the cache -> their hidden states [q, d]."""
        self.backbone.cache.claim(self._most_rows + len(tokens))
        hidden = self.backbone.run_chunk(torch.tensor(tokens, device=self.backbone.device))
        self._ids += tokens
        is_tapped = self._following is not None and self.backbone.is_tapped
        self._observe(tokens, hidden, self.backbone.tapped[: len(tokens)] if is_tapped else None)
        return hidden

    def _limit(self, prompt_tokens: int, settings: GenerationSettings) -> tuple[int, Reason]:
        """The largest number of tokens of the answer, and the reason for ending there."""
        room = self.backbone.context - prompt_tokens
        if settings.max_new_tokens <= room:
            return settings.max_new_tokens, "length"
        return room, "context"
