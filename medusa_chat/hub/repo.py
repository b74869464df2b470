"""A repo on the Hub at one commit: file names, sizes and hashes, and ranged reads.

HfFileSystem of huggingface_hub 2.4 returns the whole file if a server ignores ranges, and
parse_safetensors_file_metadata reads no pickles and checks no offsets.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_chat.gguf_files import parts_of, split_name
from medusa_chat.hub import client
from medusa_chat.hub.cache import cached_ids
from medusa_chat.hub.catalog import model_presets
from medusa_chat.hub.client import HubError, ask, get
from medusa_chat.hub.repo_files import COMMIT, is_repo_id, is_safe

SHA256 = re.compile(r"[0-9a-f]{64}")
MIN_READ = 128 * 1024  # bytes; most headers fit
MAX_READ = 64 * 1024 * 1024


@dataclass(frozen=True)
class RepoFile:
    """A file of a repo. blob: its SHA-256 (LFS) or git's SHA-1, which is its name in the cache."""

    name: str
    size: int
    blob: str


@dataclass(frozen=True)
class Repo:
    """A repo at one commit. gated: its licence must be accepted before a download."""

    id: str
    revision: str
    sha: str
    files: tuple[RepoFile, ...]
    gated: bool

    @property
    def sizes(self) -> dict[str, int]:
        """File path (with "/") -> bytes."""
        return {file.name: file.size for file in self.files}


def repo_info(repo: str, revision: str | None = None) -> Repo:
    """Request the files of a repo. Raises HubError, with similar ids if there is no such repo."""
    if not is_repo_id(repo):
        raise HubError(f"{repo[:100]!r} is not a valid Hub id: give owner/name", "missing")
    if client.is_offline():
        raise client.offline_error(repo)
    api, timeout = client.api(), client.answer_seconds()

    def call() -> Any:
        return api.model_info(repo, revision=revision, files_metadata=True, timeout=timeout)

    try:
        return _parse(repo, revision or "main", ask(repo, call))
    except HubError as error:
        similar = _similar_ids(repo) if error.kind == "missing" and not revision else []
        if not similar:
            raise
        raise HubError(f"{error}; did you mean {' or '.join(similar)}?", "missing") from error


def access_refusal(repo: Repo) -> HubError | None:
    """Why this user has no access to a gated repo; None if there is access."""
    if not repo.gated:
        return None
    try:
        ask(repo.id, lambda: get(f"{client.api().endpoint}/api/models/{repo.id}/auth-check"))
    except HubError as error:
        if error.kind in ("gated", "refused", "missing"):
            return error
        raise
    return None


def read(repo: Repo, name: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a file, with a ranged request. Raises HubError."""
    if stop <= start:
        return b""
    url, wanted = client.file_url(repo.id, repo.sha, name), f"bytes={start}-{stop - 1}"
    answer = ask(repo.id, lambda: get(url, byte_range=wanted))
    data = bytes(answer.content)
    if answer.status_code == 200:  # the server ignores ranges
        data = data[start:stop]
    if len(data) != stop - start:
        what = f"the Hub sent {len(data)} of {stop - start} bytes of {name}"
        raise HubError(f"{what}: try again", "network")
    return data


class HubSource:
    """A Hub repo at one commit, or one GGUF file of it, as a `Source` (checkpoints/layouts) that
    reads headers without a download. Every method raises HubError."""

    def __init__(self, repo: str, revision: str | None = None) -> None:
        repo, named = split_name(repo)
        self.repo = repo_info(repo, revision)
        self.name = repo
        self._sizes = self.repo.sizes
        if named is not None:
            if named not in self._sizes:
                raise HubError(f"{repo} has no file {named}", "missing")
            kept = {*parts_of(named), "README.md"}  # README has the licence
            self._sizes = {name: size for name, size in self._sizes.items() if name in kept}
        self._pieces: dict[str, tuple[tuple[int, bytes], ...]] = {}  # the last reads

    def files(self) -> Mapping[str, int]:
        """File path (with "/") -> bytes."""
        return dict(self._sizes)

    def read(self, file: str, start: int, length: int) -> bytes:
        """`length` bytes from byte `start`; fewer at the end of the file."""
        if file not in self._sizes:
            raise HubError(f"{self.name} has no file {file!r}", "missing")
        size = self._sizes[file]
        length = max(0, min(length, size - start))
        if length > MAX_READ:
            what = f"{length} bytes of {file}: only headers can be read without a download"
            raise HubError(what, "refused")
        pieces = self._pieces.get(file, ())
        for at, piece in pieces:
            if at <= start and start + length <= at + len(piece):
                return piece[start - at : start - at + length]
        piece = read(self.repo, file, start, min(start + max(length, MIN_READ), size))
        self._pieces[file] = (*pieces[-3:], (start, piece))
        return piece[:length]


def _parse(repo: str, revision: str, info: Any) -> Repo:
    """The Hub's response, validated, since its file names will be written. Raises HubError."""
    try:
        files = tuple(_file(sibling) for sibling in info.siblings or ())
        if not COMMIT.fullmatch(info.sha or ""):
            raise ValueError("commit")
    except (ValueError, TypeError, AttributeError) as error:
        what = f"the Hub's response for {repo} is invalid ({error})"
        raise HubError(f"{what}: try again later", "broken") from error
    return Repo(repo, revision, info.sha, files, bool(info.gated))


def _file(sibling: Any) -> RepoFile:
    lfs = sibling.lfs
    size, blob = (lfs.size, lfs.sha256) if lfs else (sibling.size, sibling.blob_id or "")
    has_hash = (SHA256 if lfs else COMMIT).fullmatch(blob)
    if not has_hash or int(size) < 0 or not is_safe(sibling.rfilename):
        raise ValueError(f"file {sibling.rfilename[:80]!r}")
    return RepoFile(sibling.rfilename, int(size), blob)


def _similar_ids(repo: str) -> list[str]:
    """At most two similar ids, from presets, the cache, and a quick search on the Hub."""
    ids = [*cached_ids()]
    for preset in model_presets():
        ids += filter(None, (preset.id, preset.base))
    owner, _, name = repo.rpartition("/")
    for params in ({"author": owner, "limit": 100}, {"search": name[:20], "limit": 50}):
        try:
            ids += [info.id for info in client.list_models(repo, timeout=2, **params)]
        except HubError:
            break  # a suggestion is optional
    known = {one.lower(): one for one in ids if one != repo}
    return [known[one] for one in difflib.get_close_matches(repo.lower(), known, 2, 0.8)]
