"""The Hub cache on this disk: look up, list and remove repos, without the network.

The layout is huggingface_hub's: blobs/<hash>, snapshots/<commit>/<file> linking to them, and
refs/<revision> naming a commit. Its scan_cache_dir (2.4) is used to remove repos, but it does not
list those with a broken link or no snapshot, which a user needs to see; and its
snapshot_download(local_files_only=True) does not check that the weights are complete.
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
from medusa_chat.hub.client import HubError, constants, offline_error, offline_words
from medusa_chat.hub.repo_files import COMMIT, is_repo_id, parse_json

MAX_JSON = 16_000_000


@dataclass(frozen=True)
class CachedModel:
    """A repo in the cache. bytes: what removing it frees, unfinished downloads included.

    whole: whether it can be loaded without the network; leftover_bytes: of unfinished downloads;
    folder: the complete snapshot, if any.
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
    """The cache of huggingface_hub; it may not exist."""
    return Path(constants().HF_HUB_CACHE).expanduser()


def storage(repo: str) -> Path:
    """The folder of a repo in the cache; it may not exist."""
    return cache_folder() / "--".join(("models", *repo.split("/")))


def snapshot_folder(repo: str, sha: str) -> Path:
    """The folder with the files of a commit; it may not exist."""
    return storage(repo) / "snapshots" / sha


def find(repo: str, revision: str | None = None) -> Path | None:
    """The complete snapshot of a repo, if it is cached. No network.

    revision: a branch, a tag, refs/pr/N or a commit; None for main, or else the newest complete
    snapshot, even if no branch or tag refers to it.
    """
    if revision is None:
        return find(repo, "main") or newest_snapshot(storage(repo))
    sha = _commit(repo, revision)
    folder = snapshot_folder(repo, sha) if sha else None
    return folder if folder and is_whole(folder) else None


def cached_folder(repo: str) -> Path | None:
    """The complete snapshot of owner/name, or one that has the file of owner/name/FILE.gguf, if it
    is cached: the preset's revision, else any. `pull` fetches updates. No network."""
    repo, file = split_name(repo)
    preset = model_preset(repo)
    folder = find(repo, preset.revision if preset else None) or find(repo)
    parts = parts_of(file) if file else ()
    return folder if folder and all((folder / part).is_file() for part in parts) else None


def resolve(repo: str) -> Path:
    """`cached_folder`, but raises HubError if the repo is not cached."""
    folder = cached_folder(repo)
    if folder is None and not storage(split_name(repo)[0]).is_dir():
        raise offline_error(repo)
    if folder is None:
        what = f"the cached copy of {repo} is incomplete"
        raise HubError(f"{what}, and {offline_words(repo)}", "offline")
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a snapshot has all its weights or heads; file sizes are not checked."""
    return _contents(folder)[0]


def newest_snapshot(repo_folder: Path) -> Path | None:
    """The newest complete snapshot in a repo's cache folder."""
    folders = filter(is_whole, (repo_folder / "snapshots").glob("*"))
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def cached_ids() -> tuple[str, ...]:
    """Ids of all model repos in the cache."""
    names = (folder.name for folder in cache_folder().glob("models--*"))
    ids = (name.removeprefix("models--").replace("--", "/") for name in names)
    return tuple(sorted(filter(is_repo_id, ids)))


def cached() -> tuple[CachedModel, ...]:
    """All model repos in the cache, sorted by id."""
    return tuple(_describe(repo) for repo in cached_ids())


def remove(repo: str) -> int:
    """Delete a repo, or one of its GGUF files, from the cache; returns the bytes freed. Raises
    HubError."""
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
            if folder.is_dir():  # huggingface_hub skips corrupt repos
                shutil.rmtree(folder)
            shutil.rmtree(cache_folder() / ".locks" / folder.name, ignore_errors=True)
    except OSError as error:
        why = f"cannot remove {repo} from {folder} ({error.strerror})"
        raise HubError(f"{why}: check its permissions", "disk") from error
    return before - bytes_in(cache_folder())


def _delete(repo: str, files: tuple[str, ...] = ()) -> None:
    """Delete these files of a repo, or all its revisions, with huggingface_hub, which knows the
    shared blobs."""
    from huggingface_hub import scan_cache_dir

    report = scan_cache_dir(cache_folder())
    own = [one for one in report.repos if (one.repo_type, one.repo_id) == ("model", repo)]
    report = replace(report, repos=frozenset(own))  # a renamed repo can have the same commit
    revisions = [revision for one in own for revision in one.revisions]
    if not files:
        return report.delete_revisions(*(one.commit_hash for one in revisions)).execute()
    if not own:
        then = f"remove it (medusa-chat models rm {repo}), then pull it again"
        raise HubError(f"the cached copy of {repo} is corrupt: {then}", "damaged")
    chosen = [
        file
        for revision in revisions
        for file in revision.files
        if file.file_path.relative_to(revision.snapshot_path).as_posix() in files
    ]
    return report.delete_files(*chosen).execute()


def _describe(repo: str) -> CachedModel:
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
        revision="main"
        if "main" in refs
        else next(iter(refs), snapshot.name if snapshot else None),
        folder=snapshot,
        last_used=max((facts.st_atime for _, facts in blobs), default=0.0),
    )


def _contents(folder: Path) -> tuple[bool, bool]:
    """(whether a snapshot is complete, whether it has Medusa heads)."""
    names = names_in(folder)
    backbone = repo_files.backbone(names)
    index, config = _read_json(folder, backbone.index), _read_json(folder, backbone.config)
    weights = set(repo_files.backbone(names, index).weights)
    is_model = bool(weights) and backbone.config in names
    has_heads = bool(repo_files.heads_files(names))
    can_load = is_model or has_heads or bool(whole_files(names))
    has_heads |= repo_files.says_medusa(config) or repo_files.index_has_heads(index)
    return can_load and weights <= names, has_heads


def _commit(repo: str, revision: str) -> str | None:
    """The commit of a revision, according to the cache."""
    text = revision
    if not COMMIT.fullmatch(revision):
        with suppress(OSError, UnicodeDecodeError):
            text = (storage(repo) / "refs" / revision).read_text("utf-8").strip()
    return text if COMMIT.fullmatch(text) else None


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All files below a folder, following links; broken links are skipped."""
    for root, _, names in os.walk(folder):
        for file in (Path(root, name) for name in names):
            with suppress(OSError):
                if stat.S_ISREG((facts := file.stat()).st_mode):
                    yield file, facts


def names_in(folder: Path) -> set[str]:
    """Relative paths of a snapshot's files, with "/"."""
    return {file.relative_to(folder).as_posix() for file, _ in _files(folder)}


def bytes_in(folder: Path) -> int:
    """Bytes in a folder; a file with several links counts once."""
    sizes = {(facts.st_dev, facts.st_ino): facts.st_size for _, facts in _files(folder)}
    return sum(sizes.values())


def size_of(file: Path) -> int:
    """Bytes of a file; -1 if it does not exist."""
    try:
        return file.stat().st_size if file.is_file() else -1
    except OSError:
        return -1


def _read_json(folder: Path, name: str | None) -> dict[str, Any]:
    """The JSON object in a file of at most MAX_JSON bytes; {} if there is none."""
    file = folder / (name or "")
    with suppress(OSError):
        return parse_json(file.read_bytes()) if size_of(file) <= MAX_JSON else {}
    return {}
