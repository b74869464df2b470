"""The files of a data set on the Hub: conversations and prompts, as the training reads them."""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from medusa_chat.hub.cache import cache_folder
from medusa_chat.hub.cached_file import disk_errors
from medusa_chat.hub.client import ask
from medusa_chat.hub.environment import constants, is_offline
from medusa_chat.hub.errors import HubError, offline_error
from medusa_chat.hub.repo_files import is_repo_id

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
NOT_DATA = ("dataset_infos.json", "config.json", "state.json")


def dataset_files(name: str) -> tuple[Path, ...]:
    """The files of "owner/name", or the one of "owner/name/path/to/file", from the cache or
    downloaded. Of a data set that is cut into parts, those for training. Raises HubError."""
    owner, _, rest = name.partition("/")
    own, _, file = rest.partition("/")
    repo = f"{owner}/{own}"
    if not own or not is_repo_id(repo):
        raise HubError(
            f"there is no file {name[:200]!r}, and it is not the id of a Hub data set: correct it",
            "missing",
        )
    names = [file] if file else chosen_files(_names(repo))
    if not names:
        kinds = ", ".join(SUFFIXES)
        raise HubError(
            f"the data set {repo} has no file in a supported format ({kinds}): choose another",
            "missing",
        )
    folder = _snapshot(repo, names)
    found = tuple(folder / file for file in names if (folder / file).is_file())
    if not found:
        raise HubError(
            f"the data set {repo} has no file {names[0]}: see {repo} on the Hub", "missing"
        )
    return found


def chosen_files(names: Iterable[str]) -> list[str]:
    """The data files, sorted; only those named for training, if there are any."""
    found = sorted(n for n in names if PurePosixPath(n).suffix in SUFFIXES and _is_data(n))
    return [n for n in found if "train" in n] or found


def _is_data(name: str) -> bool:
    last = PurePosixPath(name).name
    return last not in NOT_DATA and not last.lower().startswith(("readme", "license"))


def _names(repo: str) -> list[str]:
    if is_offline():
        folder = _snapshot(repo, None)
        return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]

    def call() -> list[str]:
        from huggingface_hub import HfApi

        return HfApi(endpoint=constants().ENDPOINT).list_repo_files(repo, repo_type="dataset")

    return ask(repo, call)


def _snapshot(repo: str, names: list[str] | None) -> Path:
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
