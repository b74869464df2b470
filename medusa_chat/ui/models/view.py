"""ModelsView: what the Models tab shows, of each browser tab only what is new to it. No events."""

import time
from dataclasses import dataclass, field
from typing import Any

from medusa_chat import hub
from medusa_chat.checkpoints.machine import has_nvidia_driver, this_cpu
from medusa_chat.hub.catalog import model_presets
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session
from medusa_chat.ui.models.checkpoint_lookup import CheckpointKey, MemoryTarget
from medusa_chat.ui.models.entries import Groups, grouped
from medusa_chat.ui.models.load_form import LoadChoices
from medusa_chat.ui.models.memory_fit import Machine, memory_line
from medusa_chat.ui.models.model_catalog import ModelCatalog
from medusa_chat.ui.models.picker import (
    LoadProgress,
    ModelPicker,
    for_page,
    loaded_view,
    progress_card,
)
from medusa_chat.ui.models.rows import row_view
from medusa_chat.ui.page.html_blocks import changes
from medusa_chat.ui.page.status import part_of, phase_text
from medusa_chat.ui.page.tree_view import to_line

STILL_SECONDS = 0.5  # a text is looked up once nobody types any more
MEMORY_SECONDS = 5.0
MOST_FOUND = 30  # of a search: more are found by another word
NOTHING = "Nothing found: give a Hub id, or the whole path of a folder or of a GGUF file."
NOT_YOURS = to_line(
    {"guest": "Which model answers is chosen by the person who shared this page.", "rows": []}
)
Changes = tuple[Any, ...]  # (card, rows): JSON, or a skip


@dataclass
class ModelsTab:
    """One browser tab: its card and rows, since when its text is what it is, and the load that was
    asked for here: only this tab is told what became of it."""

    shown: list[str] = field(default_factory=lambda: ["", ""])
    text: str = ""
    since: float = 0.0
    asked: LoadRequest | None = None

    def is_still(self, text: str) -> bool:
        """Whether nobody types in this tab: its text has been this one for a while."""
        if text != self.text:
            self.text, self.since = text, time.monotonic()
        return not text or time.monotonic() >= self.since + STILL_SECONDS

    def changed(self, card: str, rows: str) -> Changes:
        """(card, rows), each only where this tab does not show it yet."""
        return changes(self.shown, card, rows)


class ModelsView:
    """What the tab shows of a session, of what is known of checkpoints, and of a load."""

    def __init__(self, session: Session, catalog: ModelCatalog, picker: ModelPicker) -> None:
        self.session, self.catalog, self.picker = session, catalog, picker
        self.start = session.started_with
        self.cpu = this_cpu()
        self._measured_at = float("-inf")

    def measure(self) -> None:
        """Have the memory measured anew now and then; tell the catalog where models would go."""
        if time.monotonic() > self._measured_at + MEMORY_SECONDS:
            self._measured_at = time.monotonic()
            self.session.measure_memory()
        self.catalog.set_target(self._target())

    def show(self, tab: ModelsTab, choices: LoadChoices, is_still: bool) -> Changes:
        """(card, rows) of a tab whose boxes say `choices`. is_still: nobody types in them."""
        text = "" if choices.names_one else choices.text
        search = self.catalog.search(text) if is_still else None
        results = search.rows if hub.is_offline() and search else self.catalog.found(text)
        known = self.catalog
        lists = (model_presets(), known.cached, results[:MOST_FOUND], known.local, known.copies)
        groups = grouped(choices, *lists)
        self._fill(groups, choices, is_still)
        machine = self._machine()
        rows = [row_view(group, entry, choices, machine) for group, entry in groups.all()]
        said = self._limits(search.error if search else "")
        if choices.text and not rows and is_still and not (search and search.state == "asking"):
            said = f"{NOTHING} {said}".strip()
        view = {
            "rows": rows,
            "memory": memory_line(self.session.lifecycle.memory),
            "search": search.state if search else "asking",
            "said": said,
        }
        return tab.changed(to_line(self._card(tab)), to_line(view))

    def in_use(self) -> frozenset[str]:
        """Names that must not be deleted: loaded or being loaded, with the bases."""
        names: set[str | None] = set()
        if (key := self._current()) is not None:
            detail = self.catalog.detail(key)
            names |= {*key, detail.report.backbone if detail and detail.report else None}
        if self.picker.progress.is_running and (request := self.picker.progress.request):
            detail = self.picker.progress.detail
            needs = detail.needs if detail else None
            names |= {request.checkpoint, request.backbone, needs.base if needs else None}
        return frozenset(filter(None, names))

    def _fill(self, groups: Groups, choices: LoadChoices, is_still: bool) -> None:
        """What is known goes into the entries, what is not is looked up behind the page."""
        for _, entry in groups.all():
            entry.detail = self.catalog.detail(entry.key(choices.backbone))
        if not is_still:
            return
        first = [*groups.typed, *groups.here, *groups.gguf, *groups.known, *groups.found]
        keys = [entry.key(choices.backbone) for entry in first]
        current = self._current()
        self.catalog.want([*keys[:1], *([current] if current else []), *keys[1:]])

    def _card(self, tab: ModelsTab) -> dict[str, Any]:
        """How a load goes, and the model that is there."""
        progress, state = self.picker.progress, self.session.state
        if not progress.is_running and progress.request is not tab.asked:
            progress = LoadProgress()
        return self.card_of(progress) | {
            "loaded": loaded_view(state.model, self.session.lifecycle.loaded)
        }

    def card_of(self, progress: LoadProgress) -> dict[str, Any]:
        """How a load goes."""
        state = self.session.state
        is_queued = progress.switch is not None and progress.switch.state == "waiting"
        ahead = self.session.position(progress.switch) if is_queued and progress.switch else 0
        return progress_card(progress, ahead, phase_text(state), part_of(state))

    def _limits(self, error: str) -> str:
        """Why less is shown than there may be."""
        if hub.is_offline():
            return "The network is off: only what is known and what is on this disk is shown."
        return for_page(error or self.catalog.hub_error)

    def _machine(self) -> Machine:
        return Machine(
            memory=self.session.lifecycle.memory,
            target=self.catalog.target,
            is_online=self.catalog.is_online(),
            is_offline=hub.is_offline(),
            context=self.start.max_context,
            in_use=self.in_use(),
            loaded=self.session.lifecycle.loaded,
        )

    def _target(self) -> MemoryTarget:
        """Where a model would go: as its process says, before that as it seems from here."""
        device = self.start.device
        if self.session.lifecycle.memory is not None:
            device = self.session.lifecycle.memory.device
        elif device == "auto":
            device = "cuda" if has_nvidia_driver() else "cpu"
        return MemoryTarget("cuda" if device.startswith("cuda") else device, self.cpu)

    def _current(self) -> CheckpointKey | None:
        """What is looked up of the model that is loaded."""
        request = self.session.lifecycle.loaded
        return CheckpointKey(request.checkpoint, request.backbone) if request else None
