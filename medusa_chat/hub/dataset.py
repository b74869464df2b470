"""Datasets on the Hub: the files with conversations or prompts for training."""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from medusa_chat.hub.cache import cache_folder, names_in
from medusa_chat.hub.client import HubError, api, ask, is_offline, offline_error
from medusa_chat.hub.download import disk_errors
from medusa_chat.hub.repo_files import is_repo_id

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
NOT_DATA = ("dataset_infos.json", "config.json", "state.json")


def dataset_files(name: str) -> tuple[Path, ...]:
    """The data files of "owner/name", or the file "owner/name/path/to/file", downloaded if they are
    not cached; of a dataset with splits, the training split. Raises HubError."""
    owner, _, rest = name.partition("/")
    own, _, file = rest.partition("/")
    repo = f"{owner}/{own}"
    if not own or not is_repo_id(repo):
        what = f"there is no file {name[:200]!r}, and it is not a dataset id"
        raise HubError(f"{what}: check the name", "missing")
    names = [file] if file else chosen_files(_names(repo))
    if not names:
        what = f"the dataset {repo} has no file in a supported format ({', '.join(SUFFIXES)})"
        raise HubError(f"{what}: choose another dataset", "missing")
    folder = _snapshot(repo, names)
    files = tuple(folder / file for file in names if (folder / file).is_file())
    if not files:
        what = f"the dataset {repo} has no file {names[0]}"
        raise HubError(f"{what}: see its page on the Hub", "missing")
    return files


def chosen_files(names: Iterable[str]) -> list[str]:
    """The data files, sorted; only those with "train" in their names, if there are any."""
    chosen = sorted(n for n in names if PurePosixPath(n).suffix in SUFFIXES and _is_data(n))
    return [n for n in chosen if "train" in n] or chosen


def _is_data(name: str) -> bool:
    last = PurePosixPath(name).name
    return last not in NOT_DATA and not last.lower().startswith(("readme", "license"))


def _names(repo: str) -> Iterable[str]:
    if is_offline():
        return names_in(_snapshot(repo))
    names: list[str] = ask(repo, lambda: api().list_repo_files(repo, repo_type="dataset"))
    return names


def _snapshot(repo: str, names: list[str] | None = None) -> Path:
    """The folder of these files, downloaded unless the network is disabled."""
    from huggingface_hub import errors, snapshot_download

    def call() -> str:
        return snapshot_download(
            repo, repo_type="dataset", allow_patterns=names, local_files_only=is_offline()
        )

    with disk_errors(cache_folder()):
        try:
            return Path(ask(repo, call))
        except errors.LocalEntryNotFoundError as error:
            raise offline_error(repo) from error
