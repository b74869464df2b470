"""Personal: the tree of the user's own chats. What is counted of them, kept, and made of it."""

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.decoding.costs import StepCosts, pick
from medusa_chat.decoding.events import Prefilled, Step
from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.errors import UsageError
from medusa_chat.jobs import Tune
from medusa_chat.messages import ModelInfo, PersonalTree, TreeFacts
from medusa_chat.session import Session
from medusa_chat.tally import Paths, Tally

VERSION = 1
MOST_BYTES = 4_000_000
LEAST_STEPS = 200  # before a tree is searched in them
GAIN = 1.02  # of expected speedup, or no tree is offered
CAUTION = 0.7  # what a rank that was never drafted here counts of its stored accuracy


@dataclass(frozen=True)
class Offer:
    """A better tree than the one in use. tokens, now: expected a step, of both, each at its best
    number of nodes. gain: of expected speedup, by the half of the chats it was not searched in."""

    tree: PersonalTree
    nodes: int
    tokens: float
    now: float
    gain: float


@dataclass
class Kept:
    """What is known of one model's heads: counts, and the tree that was chosen, if any."""

    tally: Tally = field(default_factory=Tally)
    tree: PersonalTree | None = None


class Personal:
    """Counts of every model that chatted here, one file each. folder: None keeps them nowhere.

    Every method may be called from any thread. A file that cannot be read is set aside; a disk
    that cannot be written costs only the memory of it.
    """

    def __init__(self, session: Session, folder: Path | None = None) -> None:
        self.session = session
        self.folder = folder
        self._kept: dict[str, Kept] = {}
        self._offers: dict[str, tuple[object, Offer | None]] = {}
        self._lock = threading.RLock()
        session.on_model = self.welcome
        if session.state.model is not None:
            self.welcome(session.state.model)

    def welcome(self, model: ModelInfo) -> None:
        """A model is there: the tree that was chosen for it is used again."""
        facts = model.tree_facts
        if facts is None or facts.is_personal:
            return
        tree = self.of(facts).tree
        if tree is not None:
            self.session.submit_tree(tree)

    def of(self, facts: TreeFacts) -> Kept:
        """What is known of these heads."""
        with self._lock:
            if facts.key not in self._kept:
                self._kept[facts.key] = self._read(facts.key)
            return self._kept[facts.key]

    def learn(self, first: Prefilled | None, steps: Sequence[Step]) -> None:
        """`take`, in a thread of its own: whoever commits an answer does not wait for a disk."""
        threading.Thread(target=self.take, args=(first, steps), daemon=True).start()

    def take(self, first: Prefilled | None, steps: Sequence[Step]) -> None:
        """Count an answer that has ended, of the model that is loaded."""
        model = self.session.state.model
        if first is None or model is None or model.tree_facts is None or first.model != model.name:
            return
        with self._lock:
            kept = self.of(model.tree_facts)
            if kept.tally.take(first, steps, model.heads):
                self._write(model.tree_facts.key, kept)

    def use(self, tree: PersonalTree | None) -> Tune:
        """Choose a tree for the loaded model, None for the checkpoint's own; from the next answer
        on, and after a restart. Raises UsageError without a model that has heads."""
        model = self.session.state.model
        if model is None or model.tree_facts is None:
            raise UsageError("there is no model with heads: load one first")
        with self._lock:
            kept = self.of(model.tree_facts)
            kept.tree = tree
            self._write(model.tree_facts.key, kept)
        return self.session.submit_tree(tree)

    def offer(self, model: ModelInfo) -> Offer | None:
        """A better tree than the one in use, if there is one."""
        facts = model.tree_facts
        if facts is None:
            return None
        with self._lock:
            tally = self.of(facts).tally
            state = (tally.answers, facts.choices, facts.seconds, model.nodes)
            if self._offers.get(facts.key, (None,))[0] != state:
                self._offers[facts.key] = state, better(tally, facts, model.nodes)
            return self._offers[facts.key][1]

    def _file(self, key: str) -> Path | None:
        return self.folder / f"{key}.json" if self.folder else None

    def _read(self, key: str) -> Kept:
        file = self._file(key)
        if file is None or not file.exists():
            return Kept()
        try:
            with open(file, "rb") as stream:
                return kept_from(json.loads(stream.read(MOST_BYTES)))
        except OSError:
            return Kept()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError):
            with suppress(OSError):
                file.replace(file.with_name(f"{file.name}.corrupt-{time.time_ns()}"))
            return Kept()

    def _write(self, key: str, kept: Kept) -> None:
        file = self._file(key)
        if file is not None:
            with suppress(OSError):
                paths.write_text(file, json.dumps(kept_json(kept)) + "\n")


def kept_json(kept: Kept) -> dict[str, Any]:
    """As the file holds it."""
    tree = kept.tree
    chosen = tree and {"accuracies": tree.accuracies, "choices": tree.choices}
    return {"version": VERSION, **kept.tally.to_json(), "tree": chosen}


def kept_from(values: Any) -> Kept:
    """Raises ValueError, KeyError, TypeError, AttributeError or UsageError for what is none."""
    if values["version"] != VERSION:
        raise ValueError(f"version {values['version']}")
    chosen = values["tree"]
    if chosen is None:
        return Kept(Tally.from_json(values))
    table = tuple(tuple(float(a) for a in row) for row in chosen["accuracies"])
    tree = Tree.from_choices(chosen["choices"])
    if any(not 0 <= a <= 1 for row in table for a in row):
        raise ValueError("accuracies are shares")
    return Kept(Tally.from_json(values), PersonalTree(table, tree.choices[1:]))


def better(tally: Tally, facts: TreeFacts, nodes: int) -> Offer | None:
    """The tree searched in everything counted, where such trees are worth it.

    A tree that is searched and judged by the same counts always looks better than it is. So one
    is searched in each fold, and judged against the tree in use by the other one: both must be
    better by more than GAIN. What was never drafted in these chats counts only CAUTION of what is
    stored, so that no offer rests on it alone.
    """
    if tally.steps < LEAST_STEPS or min(fold.steps for fold in tally.folds) < LEAST_STEPS // 4:
        return None
    used, size = Tree.from_choices(facts.choices), max(len(facts.choices) + 1, nodes)
    folds = [Paths(fold, facts.accuracies, CAUTION) for fold in tally.folds]
    trees = [search_likeliest(paths, size) for paths in folds]
    gains = [
        _speed(judge, tree, facts, nodes) / _speed(judge, used, facts, nodes)
        for judge, tree in zip(folds, reversed(trees), strict=True)
    ]
    if min(gains) <= GAIN:
        return None
    whole = Paths(tally.whole, facts.accuracies, CAUTION)
    found = search_likeliest(whole, size)
    best, here = _best(whole, found, facts, nodes), _best(whole, used, facts, nodes)
    counted = tally.whole.table(facts.accuracies)
    table = tuple(tuple(round(a, 5) for a in row) for row in counted)
    return Offer(
        PersonalTree(table, found.choices[1:]), best[0], best[1], here[1], sum(gains) / len(gains)
    )


def search_likeliest(paths: Paths, nodes: int) -> Tree:
    """The tree of at most `nodes` nodes that gives the most tokens a step by these paths, in order
    of value: the greedy search of training/tree_search.py over paths instead of ranks."""
    frontier: list[tuple[float, int, Choice]] = []
    choices: list[Choice] = []

    def push(above: Choice, worth: float) -> None:
        if len(above) < len(paths.table):
            for rank in range(len(paths.table[len(above)])):
                choice = (*above, rank)
                if (value := worth * paths.share(choice)) > 0:
                    heappush(frontier, (-value, len(choice), choice))

    push((), 1.0)
    while frontier and len(choices) < nodes - 1:
        negative, _, choice = heappop(frontier)
        choices.append(choice)
        push(choice, -negative)
    return Tree.from_choices(choices)


def costs_of(facts: TreeFacts) -> StepCosts | None:
    """The measured step times; None before there are any."""
    return StepCosts(facts.sizes, facts.lengths, facts.seconds) if facts.sizes else None


def _best(paths: Paths, tree: Tree, facts: TreeFacts, nodes: int) -> tuple[int, float, float]:
    """(nodes, tokens a step, speedup) of the tree at its best size; before any step was timed at
    the size in use, where speedup is tokens."""
    expected, costs = paths.expected(tree), costs_of(facts)
    if costs is None:
        size = min(nodes, len(expected))
        return size, expected[size - 1], expected[size - 1]
    best = pick(costs, expected, costs.lengths[0])
    return best.nodes, best.tokens, best.speedup


def _speed(paths: Paths, tree: Tree, facts: TreeFacts, nodes: int) -> float:
    return _best(paths, tree, facts, nodes)[2]
