"""What the Hub says about one repo: its commit, its files with sizes and hashes, gated or not."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from medusa_chat.hub.cache import cached_ids
from medusa_chat.hub.catalog import model_presets
from medusa_chat.hub.client import ask, get
from medusa_chat.hub.environment import answer_seconds, constants, is_offline
from medusa_chat.hub.errors import HubError, offline_error
from medusa_chat.hub.repo_files import COMMIT, is_repo_id, is_safe

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RepoFile:
    """A file of a repo. sha256: of its content, for large files; sha1: git's, for small ones."""

    name: str
    size: int
    sha1: str
    sha256: str | None = None

    @property
    def blob(self) -> str:
        """Its name among the cache's blobs, which is its hash."""
        return self.sha256 or self.sha1


@dataclass(frozen=True)
class Repo:
    """A repo at one commit. gated: its licence must be accepted before files are given."""

    id: str
    revision: str
    sha: str
    files: tuple[RepoFile, ...]
    gated: bool

    def file(self, name: str) -> RepoFile | None:
        return next((file for file in self.files if file.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)


def repo_info(repo: str, revision: str | None = None) -> Repo:
    """Ask the Hub about a repo, in one request. Raises HubError, with near names for a typo."""
    if not is_repo_id(repo):
        raise HubError(f"{repo[:100]!r} is not a valid Hub id: give owner/name", "missing")
    if is_offline():
        raise offline_error(repo)
    try:
        return _repo(repo, revision or "main", _info(repo, revision))
    except HubError as error:
        if error.kind != "missing" or revision:
            raise
        near = near_names(repo, _ids_like(repo))
        if not near:
            raise
        raise HubError(f"{error}; did you mean {' or '.join(near)}?", "missing") from error


def access_refusal(repo: Repo) -> HubError | None:
    """Whether this user may have the files of a gated repo: None, or what to do about it."""
    if not repo.gated:
        return None
    try:
        get(f"api/models/{repo.id}/auth-check", repo.id)
    except HubError as error:
        if error.kind in ("gated", "refused", "missing"):
            return error
        raise
    return None


def near_names(repo: str, ids: Iterable[str]) -> list[str]:
    """At most two of `ids` that `repo` could be a misspelling of, the nearest first."""
    known = {name.lower(): name for name in ids if name != repo}
    found = difflib.get_close_matches(repo.lower(), known, n=2, cutoff=0.8)
    return [known[name] for name in found]


def _info(repo: str, revision: str | None) -> Any:
    def call() -> Any:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=constants().ENDPOINT, library_name="medusa-chat")
        return api.model_info(
            repo, revision=revision, files_metadata=True, timeout=answer_seconds()
        )

    return ask(repo, call)


def _repo(repo: str, revision: str, info: Any) -> Repo:
    """Checked, since the answer names files that will be written. Raises HubError."""
    try:
        files = tuple(_file(sibling) for sibling in info.siblings or ())
        if not COMMIT.fullmatch(info.sha or ""):
            raise ValueError("commit")
    except (ValueError, TypeError, AttributeError) as error:
        raise HubError(
            f"what the Hub says about {repo} cannot be read ({error}): try again later", "broken"
        ) from error
    return Repo(repo, revision, info.sha, files, bool(info.gated))


def _file(sibling: Any) -> RepoFile:
    lfs = sibling.lfs
    file = RepoFile(
        sibling.rfilename,
        int(lfs.size if lfs else sibling.size),
        sibling.blob_id or "",
        lfs.sha256 if lfs else None,
    )
    has_hash = SHA256.fullmatch(file.sha256) if file.sha256 else COMMIT.fullmatch(file.sha1)
    if not has_hash or file.size < 0 or not is_safe(file.name):
        raise ValueError(f"file {file.name[:80]!r}")
    return file


def _ids_like(repo: str) -> list[str]:
    """Ids that could be meant: presets, what is cached, and what the Hub finds quickly."""
    ids = [preset.id for preset in model_presets()]
    ids += [preset.base for preset in model_presets() if preset.base]
    ids += cached_ids()
    owner, _, name = repo.rpartition("/")
    for asked in ({"author": owner, "limit": 100}, {"search": name[:20], "limit": 50}):
        try:
            ids += [str(row["id"]) for row in get("api/models", repo, asked, timeout=2).json()]
        except (HubError, ValueError, KeyError, TypeError):
            break  # a guess is worth no further trouble
    return ids
