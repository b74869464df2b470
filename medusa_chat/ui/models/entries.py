"""Entries: the checkpoints to choose from, each once, in groups. No gradio."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from medusa_chat.checkpoints.inspection import Inspection
from medusa_chat.checkpoints.kept_copies import KeptCopy
from medusa_chat.checkpoints.shipped_heads import is_of
from medusa_chat.gguf_files import LocalGguf
from medusa_chat.hub import CachedModel, SearchResult
from medusa_chat.hub.catalog import ModelPreset, repo_id_of, repo_of
from medusa_chat.ui.models.checkpoint_lookup import CheckpointKey, Detail
from medusa_chat.ui.models.load_form import LoadChoices

DEMO = "demo"


@dataclass
class Entry:
    """One checkpoint with all that is known of it, from wherever. local: the file that another
    program keeps; copies: what was quantised or converted of it here; beside: a GGUF file of
    another program that serves as the backbone of heads that ship, while theirs is not here."""

    id: str
    preset: ModelPreset | None = None
    cached: CachedModel | None = None
    found: SearchResult | None = None
    detail: Detail | None = None
    local: LocalGguf | None = None
    copies: tuple[KeptCopy, ...] = ()
    beside: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Its id, and the repo that is fetched for it, or the file and its repo."""
        return frozenset({self.id, repo_of(self.id), repo_id_of(self.id)})

    @property
    def ships(self) -> bool:
        """Whether its heads ship with medusa-chat, for a base on the Hub."""
        return self.preset is not None and self.preset.ships is not None

    @property
    def report(self) -> Inspection | None:
        return self.detail.report if self.detail else None

    @property
    def is_whole(self) -> bool:
        """Whether it has a backbone of its own, so that no other may be chosen."""
        if self.report is not None and self.report.heads is not None:
            return self.report.backbone == self.id
        return self.id == DEMO or (self.preset is not None and self.preset.base is None)

    @property
    def is_here(self) -> bool:
        return self.id == DEMO or (self.report is not None and self.report.is_here)

    def look_beside(self, files: Iterable[str]) -> None:
        """Find its backbone among the GGUF files of other programs. `cached` is known already."""
        is_cached = self.cached is not None and self.cached.whole
        if self.preset is not None and self.ships and not is_cached:
            self.beside = next((path for path in files if is_of(self.preset, path)), None)

    def key(self, backbone: str | None) -> CheckpointKey:
        """What is looked up and loaded for it: a preset knows the base better than a config."""
        if self.is_whole:
            return CheckpointKey(self.id)
        base = self.beside or (self.preset.base if self.preset else None)
        return CheckpointKey(self.id, backbone or base)


@dataclass
class Groups:
    """Entries in the order in which they are shown."""

    typed: list[Entry] = field(default_factory=list)
    known: list[Entry] = field(default_factory=list)
    found: list[Entry] = field(default_factory=list)
    gguf: list[Entry] = field(default_factory=list)
    here: list[Entry] = field(default_factory=list)

    def all(self) -> Iterator[tuple[str, Entry]]:
        """All entries, each with the name of its group."""
        for name in ("typed", "known", "found", "gguf", "here"):
            yield from ((name, entry) for entry in getattr(self, name))


def grouped(
    choices: LoadChoices,
    presets: Iterable[ModelPreset],
    cached: Iterable[CachedModel],
    results: Iterable[SearchResult],
    local: Iterable[LocalGguf] = (),
    copies: Sequence[KeptCopy] = (),
) -> Groups:
    """Each checkpoint once: what was typed, then what is known, found, and on this disk: files of
    other programs, what is cached, and what copies there are of."""
    disk = {model.id: model for model in cached}
    hits = {repo.id: repo for repo in results}
    named = choices.text if choices.names_one else ""
    words = choices.words
    groups = Groups()
    if named:
        groups.typed.append(Entry(named))
    for preset in presets:
        if preset.id.lower() == named.lower():
            groups.typed = [Entry(preset.id, preset)]
        elif all(word in f"{preset.id} {preset.title}".lower() for word in words):
            groups.known.append(Entry(preset.id, preset))
    if all(word in DEMO for word in words):
        groups.known.insert(sum(entry.ships for entry in groups.known), Entry(DEMO))
    seen = {name for _, entry in groups.all() for name in entry.names}
    groups.found = [Entry(name) for name in hits if name not in seen and not named]
    seen |= {entry.id for entry in groups.found}
    files = {file.path: file for file in local}
    groups.gguf = [Entry(name) for name in _fitting(files, words) if name not in seen]
    seen |= {entry.id for entry in groups.gguf}
    others = dict.fromkeys([*disk, *(one.name for one in copies)])
    groups.here = [Entry(name) for name in _fitting(others, words) if name not in seen]
    for _, entry in groups.all():
        entry.cached, entry.found = disk.get(repo_id_of(entry.id)), hits.get(entry.id)
        entry.local = files.get(entry.id)
        entry.copies = tuple(one for one in copies if entry.names & {one.name, one.source})
        entry.look_beside(files)
    return groups


def _fitting(names: Iterable[str], words: list[str]) -> list[str]:
    return [name for name in names if all(word in name.lower() for word in words)]
