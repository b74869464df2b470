"""plan_repo(): which files are needed of one repo, and how much of each is left to fetch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_chat.gguf_files import choose_file, is_gguf, parts_of, split_name
from medusa_chat.hub import repo_files as files
from medusa_chat.hub.cache import MAX_JSON, folder_of, parse_json, read_json, storage
from medusa_chat.hub.catalog import model_preset
from medusa_chat.hub.client import file_path, get
from medusa_chat.hub.errors import HubError
from medusa_chat.hub.repo import Repo, RepoFile, access_refusal, repo_info


@dataclass(frozen=True)
class FilePlan:
    """A file that is needed. left: bytes still to fetch; 0 when it is in the cache."""

    file: RepoFile
    left: int


@dataclass(frozen=True)
class RepoPlan:
    """What is needed of one repo. role: "model" (a whole one), "heads" or "backbone".

    refusal: why this user cannot have its files yet, None when nothing stands in the way. named:
    the GGUF file that was asked for; note: which one was chosen where none was, and why.
    """

    id: str
    revision: str
    sha: str
    role: str
    files: tuple[FilePlan, ...]
    gated: bool = False
    refusal: HubError | None = None
    named: str | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The id it was requested by, with its GGUF file where one was named."""
        return f"{self.id}/{self.named}" if self.named else self.id

    @property
    def total(self) -> int:
        return sum(item.file.size for item in self.files)

    @property
    def left(self) -> int:
        return sum(item.left for item in self.files)

    @property
    def folder(self) -> Path:
        """Where its files will be."""
        return folder_of(self.id, self.sha)

    @property
    def storage(self) -> Path:
        """Where its repo is kept."""
        return storage(self.id)

    def places(self, file: RepoFile) -> tuple[Path, Path]:
        """Where a file can be: among the blobs, or in the snapshot where links do not exist."""
        return places_of(self.id, self.sha, file)


def plan_repo(
    repo: str, revision: str | None = None, role: str | None = None
) -> tuple[RepoPlan, Mapping[str, Any]]:
    """What is needed of this repo alone, and its config (a LoRA adapter's included; {} when it
    has none that may be read).

    repo: an id, or one of its GGUF files (owner/name/FILE.gguf). role: "backbone" leaves heads out;
    None means: as its files say. Raises HubError.
    """
    repo, named = split_name(repo)
    preset = model_preset(repo)
    found = repo_info(repo, revision or (preset.revision if preset else None))
    refusal = access_refusal(found)
    if named or _is_gguf_repo(found, role):
        return _gguf_plan(found, role or "model", refusal, named), {}
    places = ("adapter_config.json", "config.json", files.config_file(found.names))
    config: dict[str, Any] = {}
    for place in () if refusal else dict.fromkeys(places):
        config |= _json(found, place)
    index_name = files.index_file(found.names)
    index = _json(found, index_name) if index_name and not refusal else None
    weights = files.weight_files(found.names, index)
    if role is None:
        role = "model" if weights and _is_model(config, found, bool(refusal)) else "heads"
    needed = _needed(found, role, weights, index)
    items = _items(found, needed)
    return (
        RepoPlan(found.id, found.revision, found.sha, role, items, found.gated, refusal),
        config,
    )


def _is_gguf_repo(repo: Repo, role: str | None) -> bool:
    """Whether a GGUF file is all that there is: weights in safetensors come before it, and heads
    that name their own base."""
    has_heads = role is None and bool(files.heads_files(repo.names))
    if has_heads or files.weight_files(repo.names):
        return False
    return choose_file({file.name: file.size for file in repo.files})[0] is not None


def _gguf_plan(repo: Repo, role: str, refusal: HubError | None, named: str | None) -> RepoPlan:
    """One GGUF file with all its parts, which hold everything."""
    sizes = {file.name: file.size for file in repo.files}
    chosen, note = (named, "") if named else choose_file(sizes)
    parts = parts_of(chosen or "")
    if missing := [part for part in parts if part not in sizes]:
        others = [name for name in sizes if is_gguf(name)][:5]
        hint = f"it has {', '.join(others)}" if others else "it has no GGUF file"
        what = missing[0] or "model in a GGUF file"
        raise HubError(f"{repo.id} has no {what}: {hint}", "missing")
    items = _items(repo, [file for file in repo.files if file.name in parts])
    return RepoPlan(
        *(repo.id, repo.revision, repo.sha, role, items, repo.gated, refusal, named, note)
    )


def _is_model(config: Mapping[str, Any], repo: Repo, is_closed: bool) -> bool:
    """Whether weights under a model's names are a model's: heads are found under them too."""
    if is_closed:  # its config cannot be read yet
        return not files.heads_files(repo.names)
    return isinstance(config.get("model_type"), str) and config["model_type"] != "medusa"


def _needed(
    repo: Repo, role: str, weights: tuple[str, ...], index: Mapping[str, Any] | None
) -> list[RepoFile]:
    names: set[str] = set()
    if role != "heads":
        names |= set(files.backbone_files(repo.names, index))
    if role != "backbone":
        names |= set(files.files_of_heads(repo.names))
    if role == "heads" and not files.heads_files(repo.names):
        names |= set(weights)
    found = [file for file in repo.files if file.name in names]
    missing = names - set(repo.names)
    if missing:
        raise HubError(
            f"{repo.id} lacks {sorted(missing)[0]}, which its index names: ask its owner to add it",
            "broken",
        )
    usable = weights if role != "heads" else weights or files.heads_files(repo.names)
    if not usable:
        raise HubError(
            f"{repo.id} holds neither Medusa heads nor weights in safetensors, .bin or GGUF: "
            "choose another repo (see medusa-chat models search)",
            "refused",
        )
    return found


def _json(repo: Repo, name: str) -> dict[str, Any]:
    """A small JSON object of the repo, from the cache where it is there; {} when it is none."""
    file = repo.file(name)
    if file is None or file.size > MAX_JSON:
        return {}
    place = folder_of(repo.id, repo.sha) / name
    if place.is_file():
        return read_json(place)
    return parse_json(bytes(get(file_path(repo.id, repo.sha, name), repo.id).content))


def _items(repo: Repo, needed: list[RepoFile]) -> tuple[FilePlan, ...]:
    """The files that are needed, with the bytes left; files of one content are fetched once."""
    items: dict[str, FilePlan] = {}
    seen: set[str] = set()
    for file in needed:
        left = 0 if file.blob in seen else _left(repo.id, repo.sha, file)
        items[file.name] = FilePlan(file, left)
        seen.add(file.blob)
    return tuple(items.values())


def places_of(repo: str, sha: str, file: RepoFile) -> tuple[Path, Path]:
    """RepoPlan.places of a file."""
    return storage(repo) / "blobs" / file.blob, folder_of(repo, sha) / file.name


def _left(repo: str, sha: str, file: RepoFile) -> int:
    """Bytes to fetch: nothing for a file of the right size, the rest for one that was begun."""
    places = places_of(repo, sha, file)
    if file.size in map(_size, places):
        return 0
    begun = _size(places[0].with_name(f"{file.blob}.incomplete"))
    return file.size - begun if 0 < begun <= file.size else file.size


def _size(place: Path) -> int:
    """Bytes of a file; -1 where there is none."""
    try:
        return place.stat().st_size if place.is_file() else -1
    except OSError:
        return -1
