"""The Hub repos on this disk: found without the network, listed, removed.

The folders are huggingface_hub's: blobs/<hash>, snapshots/<commit>/<file> linking to them, and
refs/<revision> naming a commit. Its scan_cache_dir (2.4) removes for us, but does not list a repo
with a broken link or without a snapshot, the very ones a user wants to see; and its
snapshot_download(local_files_only=True) does not look whether the weights are there.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_chat.gguf_files import parts_of, split_name, whole_files
from medusa_chat.hub import repo_files
from medusa_chat.hub.catalog import model_preset
from medusa_chat.hub.client import HubError, constants, offline_error
from medusa_chat.hub.repo_files import COMMIT, is_repo_id, parse_json

MAX_JSON = 16_000_000


@dataclass(frozen=True)
class CachedModel:
    """A repo on this disk. bytes: what removing it frees, leftovers of broken downloads included.

    whole: whether a model or heads can be loaded from it without the network; leftover_bytes: of
    downloads that did not end; folder: its whole snapshot, None when there is none.
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


def snapshot_folder(repo: str, sha: str) -> Path:
    """The files of one commit; it need not exist."""
    return storage(repo) / "snapshots" / sha


def find(repo: str, revision: str | None = None) -> Path | None:
    """The snapshot of a repo that is whole in the cache; None where there is none. No network.

    revision: a branch, a tag, refs/pr/N or a commit; None for main, else the newest whole snapshot,
    whether or not a branch or tag still names it.
    """
    if revision is None:
        return find(repo, "main") or newest_snapshot(storage(repo))
    sha = _commit(repo, revision)
    folder = snapshot_folder(repo, sha) if sha else None
    return folder if folder and is_whole(folder) else None


def cached_folder(repo: str) -> Path | None:
    """The snapshot of a repo that is whole in the cache and has the GGUF file that is named with
    it; None where it has not. The revision that its preset names comes first, then any; it is used
    as it is: `pull` brings what is newer. No network."""
    repo, file = split_name(repo)
    preset = model_preset(repo)
    folder = find(repo, preset.revision if preset else None) or find(repo)
    parts = parts_of(file) if file else ()
    return folder if folder and all((folder / part).is_file() for part in parts) else None


def resolve(repo: str) -> Path:
    """The folder of `cached_folder`. Raises HubError where the repo is not in the cache."""
    folder = cached_folder(repo)
    if folder is None and not storage(split_name(repo)[0]).is_dir():
        raise offline_error(repo)
    if folder is None:
        what = f"the Hub repo {repo} is only partly in the cache and the network is off"
        then = f"omit --offline, or run medusa-chat models pull {repo}"
        raise HubError(f"{what}: {then}", "offline")
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a snapshot holds all of its weights or heads; sizes are not judged here."""
    return _contents(folder)[0]


def newest_snapshot(repo_folder: Path) -> Path | None:
    """The newest whole snapshot in a repo's folder of the cache."""
    folders = filter(is_whole, (repo_folder / "snapshots").glob("*"))
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def cached_ids() -> tuple[str, ...]:
    """Ids of the model repos that have a folder in the cache."""
    names = (folder.name for folder in cache_folder().glob("models--*"))
    ids = (name.removeprefix("models--").replace("--", "/") for name in names)
    return tuple(sorted(filter(is_repo_id, ids)))


def cached() -> tuple[CachedModel, ...]:
    """Every model repo in the cache, by id."""
    return tuple(_described(repo) for repo in cached_ids())


def remove(repo: str) -> int:
    """Delete a repo from the cache, leftovers included, or one GGUF file of several in it; the
    bytes freed. Raises HubError."""
    repo, file = split_name(repo)
    folder = storage(repo)
    if not is_repo_id(repo) or not folder.is_dir():
        known = [name for name in cached_ids() if name.lower() == repo.lower()]
        hint = f"; did you mean {known[0]}?" if known else ": see medusa-chat models list"
        raise HubError(f"{repo} is not in the cache{hint}", "missing")
    snapshot = find(repo)
    names = names_in(snapshot) if snapshot else set()
    if file is not None and file not in names:
        raise HubError(f"{repo}/{file} is not in the cache: see medusa-chat models list", "missing")
    before = bytes_in(cache_folder())
    try:
        if file is not None and names != set(parts_of(file)):
            _delete(repo, parts_of(file))
        else:
            _delete(repo)
            if folder.is_dir():  # huggingface_hub leaves what is broken
                shutil.rmtree(folder)
            shutil.rmtree(cache_folder() / ".locks" / folder.name, ignore_errors=True)
    except OSError as error:
        why = f"{repo} cannot be removed from {folder} ({error.strerror})"
        raise HubError(f"{why}: check its owner", "disk") from error
    return before - bytes_in(cache_folder())


def _delete(repo: str, files: tuple[str, ...] = ()) -> None:
    """By huggingface_hub, which knows the blobs that are shared: these files of a repo, else all
    its revisions."""
    from huggingface_hub import scan_cache_dir

    report = scan_cache_dir(cache_folder())
    own = [one for one in report.repos if (one.repo_type, one.repo_id) == ("model", repo)]
    report = replace(report, repos=frozenset(own))  # a commit can be in a renamed repo as well
    revisions = [revision for one in own for revision in one.revisions]
    if not files:
        return report.delete_revisions(*(one.commit_hash for one in revisions)).execute()
    if not own:
        then = f"remove all of it (medusa-chat models rm {repo}), then pull again"
        raise HubError(f"the cache of {repo} has a broken link: {then}", "damaged")
    chosen = [
        file
        for revision in revisions
        for file in revision.files
        if file.file_path.relative_to(revision.snapshot_path).as_posix() in files
    ]
    return report.delete_files(*chosen).execute()


def _described(repo: str) -> CachedModel:
    folder = storage(repo)
    refs, snapshot = sorted(names_in(folder / "refs")), find(repo)
    blobs = list(_files(folder / "blobs"))
    leftovers = (facts.st_size for file, facts in blobs if file.name.endswith(".incomplete"))
    return CachedModel(
        id=repo,
        bytes=bytes_in(folder),
        leftover_bytes=sum(leftovers),
        whole=snapshot is not None,
        has_heads=snapshot is not None and _contents(snapshot)[1],
        revision="main" if "main" in refs else next(iter(refs), snapshot and snapshot.name),
        folder=snapshot,
        last_used=max((facts.st_atime for _, facts in blobs), default=0.0),
    )


def _contents(folder: Path) -> tuple[bool, bool]:
    """Whether a snapshot is whole, and whether it holds Medusa heads."""
    names = names_in(folder)
    _, index, config, _ = repo_files.backbone(names)
    table, settings = _read_json(folder, index), _read_json(folder, config)
    weights = set(repo_files.backbone(names, table).weights)
    is_model = bool(weights) and config in names
    has_heads = bool(repo_files.heads_files(names))
    can_load = is_model or has_heads or bool(whole_files(names))
    has_heads |= repo_files.says_medusa(settings) or repo_files.index_has_heads(table)
    return can_load and weights <= names, has_heads


def _commit(repo: str, revision: str) -> str | None:
    """The commit that a revision names in the cache."""
    text = revision
    if not COMMIT.fullmatch(revision):
        with suppress(OSError, UnicodeDecodeError):
            text = (storage(repo) / "refs" / revision).read_text("utf-8").strip()
    return text if COMMIT.fullmatch(text) else None


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files however deep, links followed; what leads nowhere or is gone by now is no file."""
    for root, _, names in os.walk(folder):
        for file in (Path(root, name) for name in names):
            with suppress(OSError):
                if stat.S_ISREG((facts := file.stat()).st_mode):
                    yield file, facts


def names_in(folder: Path) -> set[str]:
    """Names of a snapshot's files, with "/" between the parts."""
    return {file.relative_to(folder).as_posix() for file, _ in _files(folder)}


def bytes_in(folder: Path) -> int:
    """The bytes in a folder; a file with two names counts once."""
    sizes = {(facts.st_dev, facts.st_ino): facts.st_size for _, facts in _files(folder)}
    return sum(sizes.values())


def size_of(file: Path) -> int:
    """Bytes of a file; -1 where there is none."""
    try:
        return file.stat().st_size if file.is_file() else -1
    except OSError:
        return -1


def _read_json(folder: Path, name: str | None) -> dict[str, Any]:
    """The JSON object in a small file; {} where there is none."""
    file = folder / (name or "")
    with suppress(OSError):
        return parse_json(file.read_bytes()) if size_of(file) <= MAX_JSON else {}
    return {}
