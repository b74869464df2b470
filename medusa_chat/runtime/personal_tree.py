"""PersonalTrees: what the heads got right in the user's own chats, and the trees made of that."""

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from medusa_chat import paths
from medusa_chat.decoding.events import Prefilled, Step
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError
from medusa_chat.messages import ModelInfo, PersonalTree, TreeFacts
from medusa_chat.runtime.requests import UseTree
from medusa_chat.runtime.scheduler import Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.trees.acceptance_counts import AcceptanceCounts
from medusa_chat.trees.suggestion import TreeSuggestion, suggest_tree

VERSION = 1
MOST_BYTES = 4_000_000


@dataclass
class StoredCounts:
    """The record of one model's heads: acceptance counts, and the chosen tree, if any."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    tree: PersonalTree | None = None

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        tree = self.tree
        chosen = tree and {"accuracies": tree.accuracies, "choices": tree.choices}
        return {"version": VERSION, **self.counts.to_json(), "tree": chosen}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """From a file's content. Raises ValueError, KeyError, TypeError, AttributeError or
        UsageError where it is broken."""
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']}")
        counts, chosen = AcceptanceCounts.from_json(values), values["tree"]
        if chosen is None:
            return cls(counts)
        table = tuple(tuple(float(a) for a in row) for row in chosen["accuracies"])
        tree = Tree.from_choices(chosen["choices"])
        if any(not 0 <= a <= 1 for row in table for a in row):
            raise ValueError("an accuracy is not between 0 and 1")
        return cls(counts, PersonalTree(table, tree.choices[1:]))


class PersonalTrees:
    """Counts of every model that chatted here, one file each. folder: None keeps them nowhere.

    Every method may be called from any thread. A file that cannot be read is set aside; a disk
    that cannot be written costs only the memory of it.
    """

    def __init__(self, session: Session, folder: Path | None = None) -> None:
        self.session = session
        self.folder = folder
        self._kept: dict[str, StoredCounts] = {}
        self._suggestions: dict[str, tuple[object, TreeSuggestion | None]] = {}
        self._lock = threading.RLock()
        session.lifecycle.on_model = self.restore
        if session.state.model is not None:
            self.restore(session.state.model)

    def restore(self, model: ModelInfo) -> None:
        """Use the tree again that was chosen for a model; called when it is loaded."""
        facts = model.tree_facts
        if facts is None or facts.is_personal:
            return
        tree = self.of(facts).tree
        if tree is not None:
            self.session.submit(UseTree(tree))

    def of(self, facts: TreeFacts) -> StoredCounts:
        """The record of these heads."""
        with self._lock:
            if facts.key not in self._kept:
                self._kept[facts.key] = self._read(facts.key)
            return self._kept[facts.key]

    def count_in_background(self, first: Prefilled | None, steps: Sequence[Step]) -> None:
        """`count` in a thread of its own: whoever commits an answer does not wait for a disk."""
        threading.Thread(target=self.count, args=(first, steps), daemon=True).start()

    def count(self, first: Prefilled | None, steps: Sequence[Step]) -> None:
        """Count an answer that has ended, of the model that is loaded."""
        model = self.session.state.model
        if first is None or model is None or model.tree_facts is None or first.model != model.name:
            return
        with self._lock:
            kept = self.of(model.tree_facts)
            if kept.counts.add_answer(first, steps, model.heads):
                self._write(model.tree_facts.key, kept)

    def use(self, tree: PersonalTree | None) -> Ticket[ModelInfo]:
        """Choose a tree for the loaded model, None for the checkpoint's own; from the next answer
        on, and after a restart. Raises UsageError without a model that has heads."""
        model = self.session.state.model
        if model is None or model.tree_facts is None:
            raise UsageError("there is no model with heads: load one first")
        with self._lock:
            kept = self.of(model.tree_facts)
            kept.tree = tree
            self._write(model.tree_facts.key, kept)
        return self.session.submit(UseTree(tree))

    def suggestion(self, model: ModelInfo) -> TreeSuggestion | None:
        """A better tree than the one in use, if there is one."""
        facts = model.tree_facts
        if facts is None:
            return None
        with self._lock:
            counts = self.of(facts).counts
            state = (counts.answers, facts.choices, facts.seconds, model.nodes)
            if self._suggestions.get(facts.key, (None,))[0] != state:
                self._suggestions[facts.key] = state, suggest_tree(counts, facts, model.nodes)
            return self._suggestions[facts.key][1]

    def _file(self, key: str) -> Path | None:
        return self.folder / f"{key}.json" if self.folder else None

    def _read(self, key: str) -> StoredCounts:
        file = self._file(key)
        if file is None or not file.exists():
            return StoredCounts()
        try:
            with open(file, "rb") as stream:
                return StoredCounts.from_json(json.loads(stream.read(MOST_BYTES)))
        except OSError:
            return StoredCounts()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError):
            with suppress(OSError):
                file.replace(file.with_name(f"{file.name}.corrupt-{time.time_ns()}"))
            return StoredCounts()

    def _write(self, key: str, kept: StoredCounts) -> None:
        file = self._file(key)
        if file is not None:
            with suppress(OSError):
                paths.write_text(file, json.dumps(kept.to_json()) + "\n")
