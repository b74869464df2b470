"""Engine: prefill, step, stop. One text at a time, as a generator of events."""

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import ACCEPTANCE, Case, Rule
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.drafters import (
    Autoregressive,
    Draft,
    Drafter,
    Medusa,
    Plan,
    PromptLookup,
    TreeTensors,
)
from medusa_chat.decoding.events import Event, Finished, Prefilled, Reason, Stats, Step
from medusa_chat.decoding.governor import Governor
from medusa_chat.decoding.grower import Grower
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.outcome import Here, Outcome, read
from medusa_chat.decoding.settings import CHUNK, GenerationSettings
from medusa_chat.decoding.stopwatch import Stopwatch
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ContextError, UsageError

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BROKEN = "the model produced invalid numbers (NaN or infinity): its weights or precision are wrong"


class Engine:
    """Decodes with a backbone and, where there are any, its Medusa heads.

    Between answers it keeps the KV cache and its exact token ids, so that a prompt that starts
    like the last text is prefilled from where they part. Closing the iterator that `generate`
    returns cancels: the cache stays valid.
    """

    def __init__(
        self,
        backbone: Backbone,
        heads: MedusaHeads | None = None,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        self.backbone = backbone
        self.heads = heads
        self.eos = eos
        self.pauses = eos  # tokens behind which nobody wants another step yet
        self.name = ""
        self.precision = PRECISIONS.get(backbone.dtype, str(backbone.dtype))
        self._ids: list[int] = []  # what the cache holds
        self._root_tensors = TreeTensors.of(ROOT, backbone.device)
        self._watch = Stopwatch(backbone.device)
        self._made: Medusa | None = None  # the last one, which the next answer mostly wants again

    def drafter(
        self,
        settings: GenerationSettings,
        tree: Tree,
        details: bool = True,
        governor: Governor | Grower | None = None,
    ) -> Drafter:
        """The drafter that resolved settings name. Raises UsageError when it needs heads.

        governor: says how much Medusa drafts at each step. It is left out where the tree changes
        the text, as it does with typical acceptance.
        """
        if settings.drafter == Autoregressive.name:
            return Autoregressive(self.backbone.device)
        if settings.drafter == PromptLookup.name:
            return PromptLookup(settings.nodes or len(tree), self.backbone.device)
        if self.heads is None:
            raise UsageError("the checkpoint has no Medusa heads: use --drafter prompt-lookup")
        if settings.acceptance != "exact" and not settings.is_greedy:
            governor = None
        made = self._made
        if made is None or not made.is_of(self.heads, tree, details, governor):
            head, vocabulary = self.backbone.lm_head, self.backbone.vocabulary
            made = self._made = Medusa(self.heads, head, tree, vocabulary, details, governor)
        return made.anew()

    def forget(self) -> None:
        """Empty the cache, so that the next prompt is prefilled whole."""
        self._ids = []
        self.backbone.cache.crop(0)

    def generate(
        self,
        prompt_ids: Sequence[int],
        drafter: Drafter,
        settings: GenerationSettings,
        details: bool = True,
    ) -> Iterator[Event]:
        """Decode after `prompt_ids`. settings: resolved, with a seed where it samples.

        details: whether each step records its draft with probabilities. Text stays "" here (see
        text.py). Raises ContextError when the prompt leaves no room, and UsageError when empty.
        """
        rule = ACCEPTANCE[settings.acceptance]
        self._require_room(prompt_ids)
        started = perf_counter()
        first, hidden, reused = self._prefill(prompt_ids, rule, settings, drafter.least)
        root_id = first.next_token
        answer: list[int] = [] if root_id in self.eos else [root_id]
        limit, at_limit = self._limit(len(prompt_ids), settings)
        prefill_seconds = perf_counter() - started
        yield Prefilled(
            model=self.name,
            precision=self.precision,
            device=str(self.backbone.device),
            settings=settings.to_json(),
            prompt_token_ids=tuple(prompt_ids),
            prompt_tokens=len(prompt_ids),
            reused_tokens=reused,
            token_ids=tuple(answer) if first.is_finite else (),
            text="",
            seconds=prefill_seconds,
            context=self.backbone.context,
        )
        steps, emitted, seconds = 0, 0, 0.0
        _, reason = self._cut([root_id], first, 0, limit, at_limit)
        known: Sequence[int] = [*prompt_ids, root_id]
        here = Here(drafter, rule, settings, details, hidden, certainty=first.certainty)
        here.ends = tuple(self.eos | self.pauses)
        while reason is None:
            started = perf_counter()
            here.most = limit - len(answer)
            outcomes, known = self._advance(here, known), []
            taken = perf_counter() - started - sum(outcome.seconds for outcome in outcomes)
            for outcome in outcomes:
                started = perf_counter()
                said = [*outcome.tokens[1:], outcome.next_token]
                known += said
                fresh, reason = self._cut(said, outcome, len(answer), limit, at_limit)
                count = len(fresh) + (reason == "eos")
                answer += fresh
                spent = outcome.seconds + taken / len(outcomes) + perf_counter() - started
                steps, emitted, seconds = steps + 1, emitted + count, seconds + spent
                yield Step(
                    steps - 1,
                    tuple(fresh),
                    "",
                    spent,
                    tuple(outcome.path[: count + 1]),
                    outcome.record,
                    outcome.heads_seconds,
                    outcome.backbone_seconds,
                    outcome.nodes,
                )
                if reason is not None:
                    break
        yield Finished(
            reason=reason,
            token_ids=tuple(answer),
            text="",
            tail="",
            stats=Stats.of(len(answer), steps, emitted, seconds, prefill_seconds),
            message=BROKEN if reason == "error" else "",
        )

    @torch.inference_mode()
    def peek(
        self, token_ids: Sequence[int], path: Sequence[int], head: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [V] of the backbone after `token_ids` and `path`, and of head `head` (from 1; 0:
        none) after `token_ids`, where a draft is made.

        What the cache held is held afterwards, but for a text that shares little with it: that
        one leaves the part they share. Raises UsageError for what no step can have had.
        """
        whole = [*token_ids, *path]
        self._require_peek(token_ids, whole, head)
        cache, before = self.backbone.cache, self._ids
        start = min(_common_prefix(before, whole), len(token_ids) - 1)
        end = min(len(whole), len(before))
        if end - start > CHUNK:  # copying that much costs more than reading it again
            self._ids = before = before[:start]
            cache.crop(start)
        kept = cache.rows(start, min(end, len(before)))
        try:
            cache.crop(start)
            rest = torch.tensor(whole[start:], device=self.backbone.device)
            hidden = torch.cat([self.backbone.run_chunk(chunk) for chunk in rest.split(CHUNK)])
        finally:
            cache.put_back(start, kept, len(before))
        logits = self.backbone.lm_head(hidden[-1:])[0]
        if not head or self.heads is None:
            return logits, None
        at = hidden[len(token_ids) - 1 - start].unsqueeze(0)
        drafted, names = self.heads.draft_logits(at, self.backbone.lm_head, head, 1)
        own = drafted[-1]
        if names is not None:  # the rest cannot be drafted
            own = own.new_full(logits.shape, -torch.inf).index_copy(0, names, own)
        return logits, own

    def _require_peek(self, token_ids: Sequence[int], whole: Sequence[int], head: int) -> None:
        if not token_ids or len(whole) > self.backbone.cache.capacity:
            raise UsageError(f"cannot look into a text of {len(whole)} tokens with this model")
        if min(whole) < 0 or max(whole) >= self.backbone.vocabulary:
            raise UsageError("this text has tokens that the loaded model does not know")
        if not 0 <= head <= (len(self.heads) if self.heads else 0):
            raise UsageError(f"the loaded model has no Medusa head {head}")

    def _require_room(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise UsageError("the prompt is empty: type something")
        context = self.backbone.context
        if len(prompt_ids) >= context:
            raise ContextError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {context}: "
                "shorten it, start a new chat, or raise --max-context where the model allows it"
            )

    @torch.inference_mode()
    def _prefill(
        self, prompt_ids: Sequence[int], rule: Rule, settings: GenerationSettings, least: float
    ) -> tuple[Outcome, Tensor, int]:
        """Bring the prompt into the cache; the first token, its hidden state, tokens reused."""
        reused = min(_common_prefix(self._ids, prompt_ids), len(prompt_ids) - 1)
        self._ids = self._ids[:reused]
        self.backbone.cache.crop(reused)
        while len(prompt_ids) - len(self._ids) > CHUNK:
            self._read(prompt_ids[len(self._ids) : len(self._ids) + CHUNK])
        rest, whole = prompt_ids[len(self._ids) :], self.backbone.whole_step
        outcome = whole and whole.read(rest, settings, least)
        if whole and outcome:
            self._ids += rest
            last = whole.hidden
        else:
            last = self._read(rest)[-1:]
            outcome = self._after(rest[-1], last, len(prompt_ids) - 1, rule, settings, least)
        if not outcome.is_finite:
            self.forget()  # nothing of a broken pass is reused
        return outcome, last, reused

    def _read(self, tokens: Sequence[int]) -> Tensor:
        """The next tokens [q] of the text into the cache: their hidden states [q, d]."""
        hidden = self.backbone.run_chunk(torch.tensor(tokens, device=self.backbone.device))
        self._ids += tokens
        return hidden

    def _after(
        self,
        token: int,
        hidden: Tensor,
        position: int,
        rule: Rule,
        settings: GenerationSettings,
        least: float,
    ) -> Outcome:
        """What follows the text's last token, from the state [1, d] there."""
        root = torch.tensor([token], device=self.backbone.device)
        draft = Draft(root, ROOT, self._root_tensors)
        case = Case(draft, self.backbone.lm_head(hidden), position, settings, False)
        outcome = read(draft, rule(case, self.backbone.judge))
        if least:
            outcome.certainty = self._certainty(case.logits[0], outcome, settings, least)
        return outcome

    def _advance(self, here: Here, known: Sequence[int]) -> list[Outcome]:
        """A step, or several: a draft after `known`, whose last token is the root; one pass of the
        backbone over it; what was accepted is in the cache afterwards, and `here` is where it
        ended."""
        cache, whole = self.backbone.cache, self.backbone.whole_step
        begun = perf_counter()
        room = self.backbone.context - 1 - cache.length
        plan = here.drafter.plan(known, room, here.certainty)
        planning = perf_counter() - begun
        outcomes = whole and whole.take(plan, known[-1], here)
        is_booked = plan.grower is not None
        if whole and outcomes:
            here.root, here.hidden = None, whole.hidden
        else:
            outcomes, is_booked = [self._by_parts(here, plan, known[-1])], False
        for outcome in outcomes:
            outcome.heads_seconds += planning / len(outcomes)
            if not is_booked:
                here.drafter.learn(outcome.nodes, outcome.path)
            if outcome.is_finite:
                self._ids += outcome.tokens
        here.certainty = outcomes[-1].certainty
        return outcomes

    @torch.inference_mode()
    def _by_parts(self, here: Here, plan: Plan, root_id: int) -> Outcome:
        """The same by operators, one after another; the device passes every mark before `read`
        ends."""
        cache, watch = self.backbone.cache, self._watch
        begun = watch.mark()
        if here.root is None:
            here.root = torch.tensor([root_id], device=self.backbone.device)
        draft = here.drafter.fill(plan, here.root, here.hidden)
        drafted = watch.mark()
        hidden = self.backbone.run_tree(draft.tokens, draft.tree, draft.tensors)
        case = Case(draft, self.backbone.lm_head(hidden), cache.length, here.settings, here.details)
        ended = watch.mark()
        accepted = here.rule(case, self.backbone.judge)
        outcome = read(draft, accepted)
        if outcome.is_finite:
            if outcome.path == list(range(len(outcome.path))):
                cache.extend(len(outcome.path))  # the rows stand where they belong
            else:
                cache.keep(accepted.path, len(outcome.path))
        if plan.least:
            logits = case.logits[outcome.path[-1]]
            outcome.certainty = self._certainty(logits, outcome, here.settings, plan.least)
        here.root, here.hidden = accepted.next_token, hidden.index_select(0, accepted.node)
        outcome.heads_seconds = watch.between(begun, drafted)
        outcome.backbone_seconds = watch.between(drafted, ended)
        return outcome

    def _certainty(
        self, logits: Tensor, outcome: Outcome, settings: GenerationSettings, least: float
    ) -> float:
        """The backbone's of what comes next; 0 for less than `least`."""
        found = self.backbone.judge.certainty(logits, outcome.next_token, settings.scale)
        return found if found >= least else 0.0

    def _limit(self, prompt_tokens: int, settings: GenerationSettings) -> tuple[int, Reason]:
        """How many tokens the answer may have, and what it means to reach that."""
        room = self.backbone.context - prompt_tokens
        if settings.max_new_tokens <= room:
            return settings.max_new_tokens, "length"
        return room, "context"

    def _cut(
        self, known: Sequence[int], outcome: Outcome, produced: int, limit: int, at_limit: Reason
    ) -> tuple[list[int], Reason | None]:
        """What of a step's tokens is emitted (without an end token), and why decoding ends."""
        if not outcome.is_finite:
            return [], "error"
        fresh: list[int] = []
        for token in known:
            if token in self.eos:
                return fresh, "eos"
            fresh.append(token)
            if produced + len(fresh) >= limit:
                return fresh, at_limit
        return fresh, None


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    if list(b[: len(a)]) == a:  # as it is when a conversation goes on: not token by token
        return len(a)
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
