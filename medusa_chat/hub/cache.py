"""The Hub repos on this disk: found without the network, and listed.

The folders are huggingface_hub's: blobs/<hash>, snapshots/<commit>/<file> linking to them, and
refs/<revision> naming a commit, which a pull writes last. Version 2.4 of it removes revisions for
us; its scan_cache_dir leaves out repos with a broken link or half a download, just those a user
wants to see and remove, and its snapshot_download(local_files_only=True) does not look for weights.
"""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_chat.gguf_files import parts_of, split_name, whole_files
from medusa_chat.hub import repo_files
from medusa_chat.hub.catalog import model_preset
from medusa_chat.hub.environment import constants
from medusa_chat.hub.errors import HubError, offline_error
from medusa_chat.hub.repo_files import COMMIT, is_repo_id

MAX_JSON = 16_000_000


@dataclass(frozen=True)
class CachedModel:
    """A repo on this disk. bytes: what removing it frees, leftovers of broken downloads included.

    whole: whether a model or heads can be loaded from it without the network; leftover_bytes: of
    downloads that did not end; folder: the files of its newest commit, None when there is none.
    """

    id: str
    bytes: int
    leftover_bytes: int
    whole: bool
    has_heads: bool
    revision: str | None
    folder: Path | None
    last_used: float


def cache_folder() -> Path:
    """Where huggingface_hub keeps repos; it need not exist."""
    return Path(constants().HF_HUB_CACHE).expanduser()


def storage(repo: str) -> Path:
    """Where one repo is kept; it need not exist."""
    return cache_folder() / "--".join(("models", *repo.split("/")))


def folder_of(repo: str, sha: str) -> Path:
    """The files of one commit; it need not exist."""
    return storage(repo) / "snapshots" / sha


def find(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a repo that is whole in the cache; None where it is not. No network.

    revision: a branch, a tag, refs/pr/N or a commit; None for main, and for whatever there is
    where main is not whole.
    """
    if revision is None:
        return find(repo, "main") or _any_snapshot(repo)
    sha = _commit(storage(repo), revision)
    folder = folder_of(repo, sha) if sha else None
    return folder if folder and is_whole(folder) else None


def cached_folder(repo: str) -> Path | None:
    """The folder of a repo that is whole in the cache, or that has the GGUF file which is named
    with it, None where it is not: the revision that its preset names, then any. It is used as it
    is: `pull` brings what is newer. No network."""
    repo, file = split_name(repo)
    preset = model_preset(repo)
    folder = find(repo, preset.revision if preset else None) or find(repo)
    parts = parts_of(file) if file else ()
    return folder if folder and all((folder / part).is_file() for part in parts) else None


def resolve(repo: str) -> Path:
    """The folder of `cached_folder`. Raises HubError where the repo is not in the cache."""
    found = cached_folder(repo)
    if found is None and not storage(split_name(repo)[0]).is_dir():
        raise offline_error(repo)
    if found is None:
        raise HubError(
            f"the Hub repo {repo} is only partly in the cache and the network is off: omit "
            f"--offline, or run medusa-chat models pull {repo}",
            "offline",
        )
    return found


def is_whole(folder: Path) -> bool:
    """Whether a snapshot holds all of its weights or heads; sizes are not judged here."""
    names = names_in(folder)
    index = repo_files.index_file(names)
    content = read_json(folder / index) if index else {}
    if not repo_files.shards_of(content) <= names:
        return False
    weights = repo_files.weight_files(names, content)
    is_model = bool(weights) and repo_files.config_file(names) in names
    return is_model or bool(repo_files.heads_files(names)) or bool(whole_files(names))


def cached_ids() -> tuple[str, ...]:
    """Ids of the model repos that have a folder in the cache."""
    names = (folder.name for folder in cache_folder().glob("models--*"))
    ids = (name.removeprefix("models--").replace("--", "/") for name in names)
    return tuple(sorted(filter(is_repo_id, ids)))


def cached() -> tuple[CachedModel, ...]:
    """Every model repo in the cache, by id."""
    return tuple(_described(repo) for repo in cached_ids())


def _described(repo: str) -> CachedModel:
    folder = storage(repo)
    revision = "main" if _commit(folder, "main") else next(iter(_refs(folder)), None)
    snapshot = find(repo, revision) or find(repo)
    revision = revision or (snapshot.name if snapshot else None)
    blobs = {file.name: facts for file, facts in _files(folder / "blobs")}
    leftovers = [facts.st_size for name, facts in blobs.items() if name.endswith(".incomplete")]
    return CachedModel(
        id=repo,
        bytes=bytes_in(folder),
        leftover_bytes=sum(leftovers),
        whole=snapshot is not None,
        has_heads=snapshot is not None and _has_heads(snapshot),
        revision=revision,
        folder=snapshot,
        last_used=max((facts.st_atime for facts in blobs.values()), default=0.0),
    )


def _has_heads(folder: Path) -> bool:
    names = names_in(folder)
    index = repo_files.index_file(names)
    return (
        bool(repo_files.heads_files(names))
        or repo_files.says_medusa(read_json(folder / repo_files.config_file(names)))
        or bool(index and repo_files.index_has_heads(read_json(folder / index)))
    )


def _any_snapshot(repo: str) -> Path | None:
    """The newest whole snapshot; one that was fetched by its commit has no ref."""
    found = [find(repo, place.name) for place in storage(repo).glob("snapshots/*")]
    return max(filter(None, found), key=lambda place: place.stat().st_mtime, default=None)


def _refs(folder: Path) -> list[str]:
    """The revisions of a repo that name a commit."""
    return sorted(names_in(folder / "refs"))


def _commit(folder: Path, revision: str) -> str | None:
    """The commit that a revision names in the cache."""
    if COMMIT.fullmatch(revision):
        return revision
    if not repo_files.is_safe(revision):
        return None
    try:
        text = (folder / "refs" / revision).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if COMMIT.fullmatch(text) else None


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files however deep, links followed; what leads nowhere or is gone by now is no file."""
    for root, _, names in os.walk(folder):
        for name in names:
            file = Path(root, name)
            try:
                facts = file.stat()
            except OSError:
                continue
            if stat.S_ISREG(facts.st_mode):
                yield file, facts


def names_in(folder: Path) -> set[str]:
    """Names of a snapshot's files, with "/" between the parts."""
    return {file.relative_to(folder).as_posix() for file, _ in _files(folder)}


def bytes_in(folder: Path) -> int:
    """The bytes in a folder; a file with two names counts once."""
    sizes = {(facts.st_dev, facts.st_ino): facts.st_size for _, facts in _files(folder)}
    return sum(sizes.values())


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a small file; {} where there is none."""
    try:
        return parse_json(file.read_bytes()) if file.stat().st_size <= MAX_JSON else {}
    except OSError:
        return {}


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object; {} for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
