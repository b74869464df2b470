"""ModelCatalog: what models there are to choose from, looked up in the background. No gradio.

The Hub is asked only while a browser shows the tab, never when the network is off.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from medusa_chat import hub
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.kept_copies import KeptCopy
from medusa_chat.errors import MedusaChatError, first_line
from medusa_chat.gguf_files import LocalGguf, local_files
from medusa_chat.ui.models.checkpoint_lookup import (
    GONE,
    NOT_ASKED,
    CheckpointKey,
    Detail,
    MemoryTarget,
    look_up,
)

WORKERS = 3
FRESH_SECONDS = 600.0  # for which something that was found is believed
RETRY_SECONDS = 60.0  # after the Hub could not be asked


@dataclass(frozen=True)
class Search:
    """What the Hub has for a text. state: "asking" still shows what an earlier search found."""

    text: str = ""
    state: Literal["asking", "done", "failed", "off"] = "off"
    rows: tuple[hub.SearchResult, ...] = ()
    error: str = ""


@dataclass
class ModelCatalog:
    """What was found so far, shared by all browser tabs; every method returns at once but refresh.

    look_up: (key, whether the Hub may be asked, target) -> Detail. clock: seconds.
    """

    look_up: Callable[[CheckpointKey, bool, MemoryTarget], Detail] = look_up
    target: MemoryTarget = MemoryTarget()
    clock: Callable[[], float] = time.monotonic
    cached: tuple[hub.CachedModel, ...] = ()
    local: tuple[LocalGguf, ...] = ()  # GGUF files of other programs
    copies: tuple[KeptCopy, ...] = ()  # what was quantised or converted here
    hub_error: str = ""  # why the Hub cannot be asked just now
    _details: dict[CheckpointKey, tuple[float, Detail]] = field(default_factory=dict)
    _searches: dict[str, tuple[float, Search]] = field(default_factory=dict)
    _wanted: list[CheckpointKey] = field(default_factory=list)
    _busy: set[CheckpointKey] = field(default_factory=set)
    _workers: int = 0
    _is_listing: bool = False
    _listed_at: float = float("-inf")
    _hub_errord_at: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_online(self) -> bool:
        """Whether the Hub may be asked, and could be a moment ago."""
        return not hub.is_offline() and self.clock() > self._hub_errord_at + RETRY_SECONDS

    # ---- single checkpoints ----

    def detail(self, key: CheckpointKey) -> Detail | None:
        """What is known of a checkpoint; None before it was looked up."""
        detail = self._details.get(key)
        return detail[1] if detail else None

    def want(self, keys: Sequence[CheckpointKey]) -> None:
        """Look at these in the background, the first ones first; what was wanted before and is
        not now is dropped."""
        with self._lock:
            self._wanted = list(keys)
            for _ in range(min(len(keys), WORKERS) - self._workers):
                self._workers += 1
                threading.Thread(target=self._work, name="lookup", daemon=True).start()

    def refresh(self, key: CheckpointKey) -> Detail:
        """Look at a checkpoint now, whatever was known."""
        detail = self.look_up(key, not hub.is_offline(), self.target)
        self._keep(key, detail)
        return detail

    def set_target(self, target: MemoryTarget) -> None:
        """Estimate memory for this target from now on."""
        if target != self.target:
            self.target = target
            self.forget()

    def forget(self) -> None:
        """Look everything up again, because the files on this disk have changed."""
        with self._lock:
            self._details = {key: (float("-inf"), old[1]) for key, old in self._details.items()}
            self._listed_at = float("-inf")

    def _work(self) -> None:
        while (key := self._next()) is not None:
            try:
                self._keep(key, self.look_up(key, self.is_online(), self.target))
            except Exception as error:  # shown in its row; the others are looked at all the same
                self._keep(key, Detail(error=f"it cannot be inspected: {first_line(error)}"))
            finally:
                with self._lock:
                    self._busy.discard(key)

    def _next(self) -> CheckpointKey | None:
        """The first that is wanted and not known; None ends the worker."""
        with self._lock:
            for key in self._wanted:
                if key not in self._busy and not self._is_fresh(key):
                    self._busy.add(key)
                    return key
            self._workers -= 1
            return None

    def _is_fresh(self, key: CheckpointKey) -> bool:
        at, detail = self._details.get(key, (float("-inf"), None))
        is_short = detail is not None and detail.kind in NOT_ASKED
        return self.clock() < at + (RETRY_SECONDS if is_short else FRESH_SECONDS)

    def _keep(self, key: CheckpointKey, detail: Detail) -> None:
        with self._lock:
            self._details[key] = (self.clock(), detail)
            if detail.kind in GONE:
                self.hub_error, self._hub_errord_at = detail.error, self.clock()
            elif detail.needs is not None:
                self.hub_error = ""

    # ---- the Hub's list and the disk's ----

    def search(self, text: str) -> Search:
        """What is known for a text; the first call for it asks the Hub in the background."""
        text = " ".join(text.lower().split())
        if hub.is_offline():
            return Search(text, "off", tuple(hub.last_search(text)))
        with self._lock:
            at, known = self._searches.get(text, (float("-inf"), Search(text)))
            keep = RETRY_SECONDS if known.state == "failed" else FRESH_SECONDS
            if known.state == "asking" or self.clock() < at + keep:
                return known
            rows = known.rows or tuple(hub.last_search(text))
            asking = Search(text, "asking", rows)
            self._searches[text] = (self.clock(), asking)
        threading.Thread(target=self._search, args=(asking,), name="search", daemon=True).start()
        return asking

    def found(self, text: str) -> tuple[hub.SearchResult, ...]:
        """What is known to be on the Hub for a text, without asking anybody."""
        words = text.lower().split()
        _, known = self._searches.get(" ".join(words), (0.0, Search()))
        if known.rows or known.state == "done":
            return known.rows
        _, everything = self._searches.get("", (0.0, Search()))
        return tuple(r for r in everything.rows if all(word in r.id.lower() for word in words))

    def _search(self, asked: Search) -> None:
        try:
            result = Search(asked.text, "done", tuple(hub.search(asked.text)))
        except MedusaChatError as error:
            result = Search(asked.text, "failed", asked.rows, str(error))
        except Exception as error:  # shown: the page itself goes on
            result = Search(asked.text, "failed", asked.rows, f"no search: {first_line(error)}")
        with self._lock:
            self._searches[asked.text] = (self.clock(), result)

    def cached_repo(self, repo: str) -> hub.CachedModel | None:
        """What was listed of a repo on this disk."""
        return next((model for model in self.cached if model.id == repo), None)

    def list_cached(self) -> None:
        """Read in the background what lies on this disk, if that was not done just now."""
        with self._lock:
            if self._is_listing or self.clock() < self._listed_at + 10:
                return
            self._is_listing, self._listed_at = True, self.clock()
        threading.Thread(target=self._list, name="cached", daemon=True).start()

    def _list(self) -> None:
        try:
            self.copies, self.local = kept_copies.kept(), local_files()
            self.cached = hub.cached()
        except (OSError, MedusaChatError):
            self.cached = ()
        finally:
            self._is_listing = False
