"""ScriptedRunner: a model made of a text and dice, so that the page can be tested without one."""

import math
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from medusa_chat.decoding.events import (
    DraftRecord,
    Event,
    Finished,
    Learnt,
    Prefilled,
    Reading,
    Stats,
    Step,
)
from medusa_chat.decoding.reasoning import THINK, Part, ReasoningReader
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import (
    Count,
    CountRequest,
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    ModelInfo,
    Peek,
    PeekRequest,
    Prompt,
    Ranked,
    Request,
    TokenIds,
    TreeFacts,
)
from medusa_chat.runtime.requests import MeasureMemory, Reply
from medusa_chat.trees.shapes import chain

WORDS = (
    "Medusa adds a few small heads to a model . Each head guesses one token further ahead , and "
    "the guesses are put together into a tree of candidates . One pass of the model checks the "
    "whole tree , the longest path it agrees with is kept , and the rest is thrown away .\n"
    "- It is **lossless** with exact acceptance .\n- Here is `code` and a < b && c > d .\n\n"
).split(" ")
PIECES = [WORDS[0]] + [w if w in ".," else f" {w}" for w in WORDS[1:]]
ACCURACY = (0.62, 0.15, 0.08, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01, 0.005)


def best_tree(nodes: int, depth: int = 4) -> Tree:
    """The `nodes` most promising nodes: products of made-up rank accuracies, deeper is worse."""
    worth = {(): 1.0}
    frontier: list[tuple[int, ...]] = [()]
    for level in range(depth):
        grown = [(*c, r) for c in frontier for r in range(len(ACCURACY))]
        worth |= {c: worth[c[:-1]] * ACCURACY[c[-1]] * 0.85**level for c in grown}
        frontier = sorted(grown, key=lambda c: -worth[c])[: nodes * 2]
    order = sorted(worth, key=lambda c: (-worth[c], len(c)))[1:]
    chosen = [c for c in order[: nodes * 3]]
    kept: set[tuple[int, ...]] = {()}
    taken = []
    for choice in chosen:
        if choice[:-1] in kept and len(taken) < nodes - 1:
            kept.add(choice)
            taken.append(choice)
    return Tree.from_choices(taken)


@dataclass
class ScriptedRunner:
    """Answers every prompt with the same words, `steps` steps long, `delay` seconds a step.

    last: the steps of the last answer, what a picture is compared with. fail_at: raise there.
    hold_at: wait before that step until it is moved on, however slow the machine that looks is.
    parts: of a prompt of which the reading of the first ones is told.
    left_out: messages that the context has no room for.
    plain_share: of a plain step in the delay of a tree step.
    sampling: the model's own defaults; name: the model's.
    forced: settings that stand over those asked for.
    is_load_held: a load reads until it is stopped or closed.
    """

    delay: float = 0.02
    prefill: float = 0.05
    is_load_held: bool = False
    parts: int = 1
    left_out: int = 0
    steps: int = 40
    nodes: int = 16
    fail_at: int | None = None
    hold_at: int | None = None
    pieces: Sequence[str] = tuple(PIECES)
    last: list[Step] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    settings: list[GenerationSettings] = field(default_factory=list)
    peeks: list[PeekRequest] = field(default_factory=list)
    forced: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, float] = field(default_factory=dict)
    name: str = "scripted"
    plain_share: float = 0.8
    node_cost: float = 0.02  # of a plain step's time, for each node more
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, request: Request[Any]) -> Iterator[Any]:
        """What a worker brings; the methods below are its parts, for a test to replace."""
        match request:
            case LoadRequest():
                yield from self.load(request)
            case Reply(prompt, settings):
                yield from self.reply(prompt, settings)
            case PeekRequest():
                yield self.peek(request)
            case CountRequest(messages):
                yield Count(len(messages[-1]["content"].split()), 1000)
            case MeasureMemory():
                yield DeviceMemory("cpu", 8 * 10**9, 16 * 10**9)

    def load(self, request: LoadRequest) -> Iterator[LoadPhase]:
        yield LoadPhase("read")
        if self.is_load_held:
            self._stop.wait()
        yield LoadPhase("ready", self.model)

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(
            name=self.name,
            family="llama",
            precision="fp32",
            device="cpu",
            parameters=8_123_456,
            heads=4,
            context=2048,
            tree="demo",
            nodes=self.nodes,
            tree_reason="the checkpoint's own tree, cut to 16 nodes on a CPU",
            memory_bytes=64 * 2**20,
            notes=("attention: medusa_sdpa",),
            tree_facts=self.facts,
            sampling=self.sampling,
        )

    @property
    def facts(self) -> TreeFacts:
        table = tuple(tuple(a * 0.85**head for a in ACCURACY) for head in range(4))
        return TreeFacts(
            accuracies=table,
            choices=best_tree(24).choices[1:],
            is_calibrated=True,
            measured_on="12 answers to secret-file.jsonl",
            positions=3456,
            rates=((1, 1.0), (8, 2.1), (16, 2.4)),
        )

    @property
    def learnt(self) -> Learnt:
        """What an answer's end tells of the costs of steps."""
        nodes = (1, 4, 8, 16, 24)
        return Learnt(
            plain_seconds=0.01,
            nodes=nodes,
            costs=tuple(1 + self.node_cost * (n - 1) for n in nodes),
            steps=40,
            trust=1.0,
        )

    def peek(self, request: PeekRequest) -> Peek:
        """Ten words of the script, each half as probable as the one before."""
        self.peeks.append(request)

        def top(start: int) -> tuple[Ranked, ...]:
            ids = [(start + i) % len(self.pieces) for i in range(10)]
            return tuple(
                Ranked(token, self.pieces[token], 0.5 ** (i + 1), i + 1)
                for i, token in enumerate(ids)
            )

        asked = tuple(Ranked(t, self.pieces[t], 0.125, 3) for t in request.tokens)
        at = len(request.path)
        return Peek(top(at), top(at + 20) if request.head else (), asked, asked)

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._stop.set()

    def gone(self) -> None:
        return None

    def process_memory(self) -> int | None:
        return 256 * 2**20

    def reply(self, prompt: Prompt, settings: GenerationSettings) -> Iterator[Event]:
        self._stop.clear()
        settings = replace(settings, **self.forced)
        self.last.clear()  # first: who sees the prompt takes no step of before for its own
        self.prompts.append(prompt)
        self.settings.append(settings)
        is_plain = settings.drafter == "none"
        tree = ROOT if is_plain else chain(3) if settings.tree == "chain" else best_tree(self.nodes)
        drafter = settings.drafter or "medusa"
        resolved = replace(settings, drafter=drafter, nodes=len(tree), seed=settings.seed or 7)
        for part in range(1, self.parts):
            yield Reading(1000 * part, 1000 * self.parts)
        if self._stop.wait(self.prefill):
            yield Finished("cancelled", (), "", "", Stats(0, 0, None, 0.0, self.prefill, None))
            return
        reader = ReasoningReader(THINK)
        begun = prompt.ids[-prompt.begun :] if isinstance(prompt, TokenIds) else ()
        token = (begun[-1] + 1) % len(self.pieces) if begun else 0  # it goes on from there
        said = [self.pieces[one % len(self.pieces)] for one in (*begun, token)]
        first = reader.push("".join(said))
        read = prompt.ids if isinstance(prompt, TokenIds) else tuple(range(12))
        yield Prefilled(
            *("scripted", "fp32", "cpu", resolved.to_json(), read, len(read), 0, (token,)),
            text=first.text,
            reasoning=first.reasoning,
            seconds=self.prefill,
            context=2048,
            left_out=self.left_out,
        )
        yield from self._decode(tree, settings, reader, first, token)

    def _decode(
        self,
        tree: Tree,
        settings: GenerationSettings,
        reader: ReasoningReader,
        whole: Part,
        first: int,
    ) -> Iterator[Event]:
        dice = random.Random(settings.seed or 7)
        tokens, seconds, reason = [first], 0.0, "eos"
        for index in range(self.steps):
            delay = self.delay if len(tree) > 1 else self.delay * self.plain_share
            while self.hold_at is not None and index >= self.hold_at and not self._stop.wait(0.02):
                pass
            if self._stop.wait(delay):
                reason = "cancelled"
                break
            if index == self.fail_at:
                raise MedusaChatError("the script says: fail here, then go on")
            step = scripted_step(index, tree, tokens[-1], dice, settings, delay, self.pieces)
            part = reader.push(step.text)
            step = replace(step, text=part.text, reasoning=part.reasoning)
            self.last.append(step)
            tokens += step.token_ids
            whole = whole.plus(part)
            seconds += delay
            yield step
            if len(tokens) >= settings.max_new_tokens:
                reason = "length"
                break
        count = len(tokens) - 1
        rate = count / len(self.last) if self.last else None
        stats = Stats(
            len(tokens),
            len(self.last),
            rate,
            seconds,
            self.prefill,
            count / seconds if seconds else None,
            self.delay * self.plain_share if len(tree) > 1 and self.delay else None,
        )
        tail = reader.finish()
        whole = whole.plus(tail)
        learnt = self.learnt if len(tree) > 1 else None
        yield Finished(
            reason,
            tuple(tokens),
            whole.text,
            tail.text,
            stats,
            reasoning=whole.reasoning,
            learnt=learnt,
        )


def scripted_step(
    index: int,
    tree: Tree,
    root: int,
    dice: random.Random,
    settings: GenerationSettings,
    seconds: float,
    pieces: Sequence[str],
) -> Step:
    """A step whose true continuation is the next words; a head's guess is right by ACCURACY."""
    truth = [(root + 1 + depth) % len(pieces) for depth in range(tree.depth + 1)]
    right = {}  # depth -> the rank at which the head has the truth
    for depth in range(1, tree.depth + 1):
        right[depth] = dice.choices(range(len(ACCURACY) + 1), (*ACCURACY, 0.1))[0]
    tokens, path = [root], [0]
    for node in range(1, len(tree)):
        depth, rank = tree.depths[node], tree.ranks[node]
        is_true = rank == right[depth]
        other = (truth[depth - 1] + 3 + rank * 5 + depth) % len(pieces)
        other = (other + 1) % len(pieces) if other == truth[depth - 1] else other
        tokens.append(truth[depth - 1] if is_true else other)
        if is_true and tree.parents[node] == path[-1]:
            path.append(node)
    is_typical = settings.acceptance != "exact" and not settings.is_greedy
    entropies = [round(dice.uniform(0.3, 2.5), 4) for _ in range(len(tree))]
    thresholds = [min(0.09, 0.3 * math.exp(-h)) if is_typical else None for h in entropies]
    emitted = tuple(tokens[node] for node in path[1:]) + (truth[len(path) - 1],)
    taken = set(path)
    draft = DraftRecord(
        tokens=tuple(tokens),
        parents=tree.parents,
        ranks=tuple(None if rank < 0 else rank for rank in tree.ranks),
        draft_probabilities=tuple(
            None if rank < 0 else round(ACCURACY[rank] * dice.uniform(0.5, 1.5), 4)
            for rank in tree.ranks
        ),
        probabilities=tuple(
            None if not node else round(dice.uniform(0.3, 0.95) if node in taken else 0.012, 6)
            for node in range(len(tree))
        ),
        entropies=tuple(entropies),
        thresholds=tuple(thresholds),
        sampled=tuple(None if is_typical else truth[depth] for depth in tree.depths),
        texts=tuple(pieces[token] for token in tokens),
        next_text=pieces[emitted[-1]],
    )
    text = "".join(pieces[token] for token in emitted)
    parts = {"heads_seconds": seconds * 0.06, "backbone_seconds": seconds * 0.8}
    return Step(index, emitted, text, seconds, tuple(path), draft, **parts, nodes=len(tree))
