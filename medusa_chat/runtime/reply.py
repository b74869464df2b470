"""reply(): answers a conversation, with its settings resolved for the loaded model."""

import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from typing import Any

from medusa_chat.checkpoints.devices import refuse_out_of_memory
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.memory_needs import smaller_precisions
from medusa_chat.decoding.budget import Budget
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.continuation import DEPTH
from medusa_chat.decoding.drafters.drafter import Drafting
from medusa_chat.decoding.drafters.kinds import Kind
from medusa_chat.decoding.events import Finished, Prefilled, Reading, Step, Told
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.errors import UsageError
from medusa_chat.messages import Fresh, ModelInfo, TokenIds
from medusa_chat.runtime.plain_clock import plain_step_seconds
from medusa_chat.runtime.prompt import cached_text, encode, encode_latest
from medusa_chat.runtime.requests import Reply
from medusa_chat.trees.presets import load_tree

DRAFTED, MOST_DRAFTED = 6, 32  # nodes of a drafter's own tree without a budget, at least, at most
CHEAP = 1.1  # plain steps that a step of more than the least may cost
DRAFT_EXPECTED = tuple(accumulate(0.7**n for n in range(DEPTH + 1)))  # tokens by nodes


def reply(
    loaded: LoadedModel, asked: Reply, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Told]:
    """Answer a conversation, or continue a raw text. Raises MedusaChatError if that is refused."""
    prompt = asked.prompt
    if isinstance(prompt, Fresh):
        loaded.engine.forget()
        loaded.said, prompt = (), prompt.text
    settings, drafter = resolve(loaded, asked.settings)
    if asked.drops_oldest and not isinstance(prompt, str | TokenIds):
        read = encode_latest(loaded, prompt, settings.max_new_tokens)
    else:
        read = encode(loaded, prompt, asked.continues, asked.template_options)
    is_chat = not isinstance(prompt, str | TokenIds)
    ids, notes = read.ids, _template_note(loaded, prompt, read.refused) if is_chat else ()
    advice = _Advice(loaded.info, settings.nodes or 1)
    reader = loaded.reasoning_reader(read.state) if is_chat else None
    begun = ids[len(ids) - prompt.begun :] if isinstance(prompt, TokenIds) else ()
    if begun and begun[-1] in loaded.engine.eos:
        raise UsageError("this token ends the answer: choose another to go on from")
    answer = loaded.engine.generate(
        ids,
        drafter,
        settings,
        texts=loaded.texts,
        should_stop=should_stop,
        reader=reader,
        logprobs=asked.logprobs,
        begun=begun,
    )
    own: list[float] = []  # busy seconds of its plain steps
    with refuse_out_of_memory(advice), closing(answer) as events:
        for event in events:
            advice.has_begun = not isinstance(event, Reading)
            if isinstance(event, Prefilled):
                backbone = loaded.info.backbone
                event = replace(event, left_out=read.left_out, backbone=backbone, notes=notes)
            elif isinstance(event, Step) and event.nodes == 1:
                own.append(event.busy_seconds)
            elif isinstance(event, Finished):
                event = _with_plain_time(loaded, ids, settings, event, own)
                budget: Budget | None = getattr(drafter, "budget", None)
                if budget is not None:
                    event = replace(event, learnt=budget.learnt)
                if is_chat and (said := cached_text(loaded, read, event)):
                    loaded.remember(said)
            yield event


def _template_note(loaded: LoadedModel, prompt: Any, refused: str) -> tuple[str, ...]:
    """The note on what the chat template refused of a conversation; only the first time in it."""
    first = next((m["content"] for m in prompt if m["role"] == "user"), "") if refused else ""
    key = hash((refused, first))
    if not refused or key in loaded.told:
        return ()
    loaded.told.add(key)
    return (f"the model's chat template accepts no {refused}",)


def _with_plain_time(
    loaded: LoadedModel,
    ids: Sequence[int],
    settings: GenerationSettings,
    last: Finished,
    own: Sequence[float],
) -> Finished:
    """The end of an answer with the time of a plain step, if one can be timed."""
    if last.reason in ("error", "cancelled"):
        return last
    plain_seconds = plain_step_seconds(loaded, ids, settings, last, own)
    return replace(last, stats=replace(last.stats, plain_step_seconds=plain_seconds))


class _Advice:
    """The message for an answer that ran out of memory: what to try, before or after its start."""

    def __init__(self, info: ModelInfo, nodes: int) -> None:
        self.info, self.nodes, self.has_begun = info, nodes, False

    def __call__(self) -> str:
        less = smaller_precisions(self.info.precision)
        tries = [f"--nodes {self.nodes // 2}"] if self.has_begun and self.nodes > 1 else []
        tries += [f"a --max-context below {self.info.context}", "a shorter chat"]
        tries += [f"--precision {less[-1]}"] if less else []
        when = "in the middle of the answer" if self.has_begun else "while the prompt was read"
        return f"out of memory {when}: try {', '.join(tries[:-1])} or {tries[-1]}"


def resolve(
    loaded: LoadedModel, settings: GenerationSettings
) -> tuple[GenerationSettings, Drafting]:
    """Resolve drafter, tree, nodes and seed -> (the settings, the drafter). Raises UsageError.

    A budget decides how much each step drafts if the tree is auto, the number of nodes is not set,
    and the draft cannot change the text (with typical acceptance it can)."""
    drafter, budget = settings.drafter or kinds.AUTO, None
    kind = loaded.kind_for_auto() if drafter == kinds.AUTO else kinds.BY_NAME[drafter]
    if drafter == kinds.AUTO and settings.tree != "auto" and loaded.info.heads:
        kind = kinds.MEDUSA  # alone it fills a given tree
    if kind is None:
        drafter, kind = kinds.LOOKUP.name, kinds.LOOKUP
    is_open = settings.tree == "auto" and settings.nodes is None
    is_open &= settings.acceptance == "exact" or settings.is_greedy
    is_recorded = loaded.engine.backend.tries > 0
    if kind is kinds.NONE:
        tree, name, nodes = ROOT, "none", 1
    elif kind is kinds.LOOKUP:  # a chain: only its length is chosen
        tree, name = ROOT, drafter
        nodes = min(settings.nodes or DEPTH + 1, DEPTH + 1)
        if is_open and not is_recorded:  # recorded chains have one length
            budget = loaded.budget(drafter, (1.0,), False)
    elif kind.has_own_tree:
        tree, name, nodes = ROOT, kind.name, settings.nodes or own_nodes(loaded, kind)
        if is_open and loaded.is_cut:
            budget = loaded.budget(drafter, DRAFT_EXPECTED, True, kind)
    elif settings.tree != "auto":
        tree, name = load_tree(settings.tree, settings.nodes), settings.tree
        nodes = len(tree)
    elif is_open:
        auto = loaded.auto_tree()
        tree, name, nodes = auto.tree, "auto", auto.nodes
        budget = loaded.budget(drafter, auto.expected, loaded.is_cut, kind)
    else:
        auto = loaded.auto_tree(settings.nodes or loaded.info.nodes)
        tree, name, nodes = auto.tree, "auto", auto.nodes
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    settings = replace(settings, drafter=drafter, tree=name, nodes=nodes, seed=seed)
    return settings, loaded.engine.drafter(settings, tree, budget, kind)


def own_nodes(loaded: LoadedModel, kind: Kind) -> int:
    """Nodes of a drafter's own tree where no budget cuts it: as many as cost little more than one
    in a step, which on a GPU are many. Few of a draft model: its levels are no single layers, but
    whole passes."""
    if kind is kinds.DRAFT:
        return DRAFTED
    return max(DRAFTED, bisect_right(loaded.times.costs()[:MOST_DRAFTED], CHEAP))
