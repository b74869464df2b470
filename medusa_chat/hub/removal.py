"""Removes Hub repos from this disk, or one GGUF file of several."""

import shutil

from medusa_chat.gguf_files import parts_of, split_name
from medusa_chat.hub.cache import bytes_in, cache_folder, cached_ids, find, names_in, storage
from medusa_chat.hub.errors import HubError
from medusa_chat.hub.repo_files import is_repo_id


def remove(repo: str) -> int:
    """Delete a repo from the cache, leftovers included, or one GGUF file of several in it; the
    bytes freed. Raises HubError."""
    repo, file = split_name(repo)
    if file is not None and _is_one_of_several(repo, file):
        return _remove_file(repo, file)
    folder = storage(repo)
    if not is_repo_id(repo) or not folder.is_dir():
        known = [name for name in cached_ids() if name.lower() == repo.lower()]
        hint = f"; did you mean {known[0]}?" if known else ": see medusa-chat models list"
        raise HubError(f"{repo} is not in the cache{hint}", "missing")
    before = bytes_in(cache_folder())
    _delete_revisions(repo)
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise HubError(
            f"{repo} cannot be removed from {folder} ({error.strerror}): check its owner", "disk"
        ) from error
    shutil.rmtree(cache_folder() / ".locks" / folder.name, ignore_errors=True)
    return before - bytes_in(cache_folder())


def _is_one_of_several(repo: str, file: str) -> bool:
    """Whether a repo in the cache holds more than this file with all its parts. Raises HubError
    without the file."""
    snapshot = find(repo)
    names = names_in(snapshot) if snapshot else set()
    if file not in names:
        raise HubError(f"{repo}/{file} is not in the cache: see medusa-chat models list", "missing")
    return names != set(parts_of(file))


def _remove_file(repo: str, file: str) -> int:
    snapshot = find(repo)
    assert snapshot is not None
    before = bytes_in(cache_folder())
    place = snapshot / file
    try:
        for part in parts_of(file):
            place = snapshot / part
            for path in {place.resolve(), place}:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise HubError(
            f"{place} cannot be removed ({error.strerror}): check its owner", "disk"
        ) from error
    return before - bytes_in(cache_folder())


def _delete_revisions(repo: str) -> None:
    """By huggingface_hub, which knows what other repos share; broken repos are not its business."""
    from huggingface_hub import scan_cache_dir

    report = scan_cache_dir(cache_folder())
    for found in report.repos:
        if (found.repo_type, found.repo_id) == ("model", repo):
            commits = (revision.commit_hash for revision in found.revisions)
            report.delete_revisions(*commits).execute()
