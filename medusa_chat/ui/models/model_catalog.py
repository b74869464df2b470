"""ModelCatalog: what models there are to choose from, looked up in the background. No gradio.

The Hub is asked only while somebody looks at the tab, never when the network is off.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from medusa_chat import hub
from medusa_chat.checkpoints.inspection import Inspection, inspect, open_anywhere
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.checkpoints.locate import open_here
from medusa_chat.checkpoints.memory_estimate import Cpu
from medusa_chat.errors import MedusaChatError, first_line
from medusa_chat.ui.models.load_form import is_folder

EVERY_CONTEXT = 10**9  # more than any model has: the report is made for all that it can read
WORKERS = 3
FRESH_SECONDS = 600.0  # for which something that was found is believed
RETRY_SECONDS = 60.0  # after the Hub could not be asked
README_BYTES = 4096
GONE = ("network", "busy")  # kinds of HubError: the Hub itself cannot be asked
NOT_ASKED = (*GONE, "offline")
LICENCE = re.compile(r"^license(?:_name)?:\s*[\"']?([\w .+-]{2,60}?)[\"']?\s*$", re.M)


class Key(NamedTuple):
    """What is looked up: "demo", a folder or a Hub id, with the backbone to use for its heads."""

    name: str
    backbone: str | None = None


class Place(NamedTuple):
    """What memory is estimated for."""

    device: str = "cpu"
    cpu: Cpu = Cpu()


CPU = Place()


@dataclass(frozen=True)
class Detail:
    """What was found about a checkpoint without loading it.

    report: for the longest context it can read; None where it could not be looked at. needs: the
    download, None where nothing has to be asked. error: why it cannot be loaded, one line with its
    remedy; link: a page for that. kind: of the HubError.
    """

    report: Inspection | None = None
    needs: hub.DownloadPlan | None = None
    licence: str = ""
    error: str = ""
    link: str = ""
    kind: str = ""

    @property
    def left(self) -> int | None:
        """Bytes to download; None while that is not known."""
        if self.needs is not None:
            return self.needs.left
        return 0 if self.report is not None and self.report.is_here else None


@dataclass(frozen=True)
class Search:
    """What the Hub has for a text. state: "asking" still shows what an earlier search found."""

    text: str = ""
    state: Literal["asking", "done", "failed", "off"] = "off"
    rows: tuple[hub.Found, ...] = ()
    error: str = ""


def look_up(key: Key, is_online: bool, place: Place = CPU) -> Detail:
    """Look at a checkpoint: on this disk where it is whole there, else on the Hub."""
    try:
        report = inspect(key.name, key.backbone, EVERY_CONTEXT, open_here, *place)
        if report.is_here or not is_online or not _is_of_hub(key.name, report):
            return Detail(report, error=next(iter(report.problems), ""))
    except MedusaChatError as error:
        if not is_online or not _is_of_hub(key.name):
            return _refused(error)
    try:
        return _look_up_there(key, place)
    except MedusaChatError as error:
        return _refused(error)


def _look_up_there(key: Key, place: Place) -> Detail:
    opened: dict[str, Source] = {}

    def opening(name: str) -> Source:
        opened[name] = open_anywhere(name)
        return opened[name]

    needs = hub.plan(key.name, None, key.backbone) if hub.is_repo_id(key.name) else None
    if needs is not None and needs.refusal is not None and needs.refusal.kind != "disk":
        return _refused(needs.refusal, needs)  # closed: there is nothing to look at yet
    base = key.backbone or (needs.base if needs else None)
    report = inspect(key.name, base, EVERY_CONTEXT, opening, *place)
    if needs is None and report.backbone and hub.is_repo_id(report.backbone):
        needs = hub.plan(report.backbone)
    licence = next(filter(None, map(_licence, opened.values())), "")
    refusal = needs.refusal if needs else None
    if refusal is not None:
        return _refused(refusal, needs, report, licence)
    return Detail(report, needs, licence, error=next(iter(report.problems), ""))


def _refused(
    error: MedusaChatError,
    needs: hub.DownloadPlan | None = None,
    report: Inspection | None = None,
    licence: str = "",
) -> Detail:
    link, kind = getattr(error, "link", ""), getattr(error, "kind", "")
    return Detail(report, needs, licence, str(error), link, kind)


def _is_of_hub(name: str, report: Inspection | None = None) -> bool:
    """Whether something of it is on the Hub: the checkpoint, or the base of local heads."""
    if report is not None and report.backbone and not report.is_here:
        return hub.is_repo_id(report.backbone)
    return name != "demo" and hub.is_repo_id(name) and not is_folder(name)


def _licence(source: Source) -> str:
    """What the front of a repo's README says; empty where it says nothing."""
    try:
        if "README.md" not in source.files():
            return ""
        front = source.read("README.md", 0, README_BYTES)
    except MedusaChatError:
        return ""
    head = front.decode("utf-8", "replace").partition("---")[2].partition("---")[0]
    found = LICENCE.search(head)
    return found[1] if found else ""


@dataclass
class ModelCatalog:
    """What was found so far, shared by all browser tabs; every method returns at once but look.

    look_up: (key, whether the Hub may be asked, place) -> Detail. clock: seconds.
    """

    look_up: Callable[[Key, bool, Place], Detail] = look_up
    place: Place = Place()
    clock: Callable[[], float] = time.monotonic
    cached: tuple[hub.CachedModel, ...] = ()
    trouble: str = ""  # why the Hub cannot be asked just now
    _details: dict[Key, tuple[float, Detail]] = field(default_factory=dict)
    _searches: dict[str, tuple[float, Search]] = field(default_factory=dict)
    _wanted: list[Key] = field(default_factory=list)
    _busy: set[Key] = field(default_factory=set)
    _workers: int = 0
    _is_listing: bool = False
    _listed_at: float = float("-inf")
    _troubled_at: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_online(self) -> bool:
        """Whether the Hub may be asked, and could be a moment ago."""
        return not hub.is_offline() and self.clock() > self._troubled_at + RETRY_SECONDS

    # ---- single checkpoints ----

    def detail(self, key: Key) -> Detail | None:
        """What is known of a checkpoint; None before it was looked at."""
        found = self._details.get(key)
        return found[1] if found else None

    def want(self, keys: Sequence[Key]) -> None:
        """Look at these in the background, the first ones first; what was wanted before and is
        not now is dropped."""
        with self._lock:
            self._wanted = list(keys)
            for _ in range(min(len(keys), WORKERS) - self._workers):
                self._workers += 1
                threading.Thread(target=self._work, name="shelf", daemon=True).start()

    def look(self, key: Key) -> Detail:
        """Look at a checkpoint now, whatever was known."""
        detail = self.look_up(key, not hub.is_offline(), self.place)
        self._keep(key, detail)
        return detail

    def stand(self, place: Place) -> None:
        """Estimate memory for this place from now on."""
        if place != self.place:
            self.place = place
            self.forget()

    def forget(self) -> None:
        """What lies on the disk has changed: look again."""
        with self._lock:
            self._details = {key: (float("-inf"), old[1]) for key, old in self._details.items()}
            self._listed_at = float("-inf")

    def _work(self) -> None:
        while (key := self._next()) is not None:
            try:
                self._keep(key, self.look_up(key, self.is_online(), self.place))
            except Exception as error:  # shown in its row; the others are looked at all the same
                self._keep(key, Detail(error=f"it cannot be looked at: {first_line(error)}"))
            finally:
                with self._lock:
                    self._busy.discard(key)

    def _next(self) -> Key | None:
        """The first that is wanted and not known; None ends the worker."""
        with self._lock:
            for key in self._wanted:
                if key not in self._busy and not self._is_fresh(key):
                    self._busy.add(key)
                    return key
            self._workers -= 1
            return None

    def _is_fresh(self, key: Key) -> bool:
        at, detail = self._details.get(key, (float("-inf"), None))
        is_short = detail is not None and detail.kind in NOT_ASKED
        return self.clock() < at + (RETRY_SECONDS if is_short else FRESH_SECONDS)

    def _keep(self, key: Key, detail: Detail) -> None:
        with self._lock:
            self._details[key] = (self.clock(), detail)
            if detail.kind in GONE:
                self.trouble, self._troubled_at = detail.error, self.clock()
            elif detail.needs is not None:
                self.trouble = ""

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

    def found(self, text: str) -> tuple[hub.Found, ...]:
        """What is known to be on the Hub for a text, without asking anybody."""
        words = text.lower().split()
        _, known = self._searches.get(" ".join(words), (0.0, Search()))
        if known.rows or known.state == "done":
            return known.rows
        _, everything = self._searches.get("", (0.0, Search()))
        return tuple(r for r in everything.rows if all(word in r.id.lower() for word in words))

    def _search(self, asked: Search) -> None:
        try:
            found = Search(asked.text, "done", tuple(hub.search(asked.text)))
        except MedusaChatError as error:
            found = Search(asked.text, "failed", asked.rows, str(error))
        except Exception as error:  # shown: the page itself goes on
            found = Search(asked.text, "failed", asked.rows, f"no search: {first_line(error)}")
        with self._lock:
            self._searches[asked.text] = (self.clock(), found)

    def list_cached(self) -> None:
        """Read in the background what lies in the cache, if that was not done just now."""
        with self._lock:
            if self._is_listing or self.clock() < self._listed_at + 10:
                return
            self._is_listing, self._listed_at = True, self.clock()
        threading.Thread(target=self._list, name="cached", daemon=True).start()

    def _list(self) -> None:
        try:
            self.cached = hub.cached()
        except (OSError, MedusaChatError):
            self.cached = ()
        finally:
            self._is_listing = False
