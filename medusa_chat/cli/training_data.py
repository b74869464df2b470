"""The files behind --data of train and calibrate: local ones, and those of Hub data sets."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from medusa_chat.errors import UsageError
from medusa_chat.hub.dataset import dataset_files

# What follows the first file of --data: `--data a.json b.json`.
More = Annotated[list[str] | None, Argument(metavar="", hidden=True)]


def data_paths(data: list[str] | None, more: list[str] | None) -> tuple[Path, ...]:
    """Local files, and the files of Hub data sets. Raises UsageError, HubError."""
    files: list[Path] = []
    for name in [*(data or ()), *(more or ())]:
        path = Path(name).expanduser()
        if path.is_dir():
            raise UsageError(f"{name} is a folder: name the files in it")
        if path.is_file():
            files.append(path)
            continue
        if name.startswith((".", "/", "~")) or name.count("/") < 1:
            raise UsageError(f"there is no file {name}: give a file, or a Hub data set OWNER/NAME")
        files += dataset_files(name)
    return tuple(files)
