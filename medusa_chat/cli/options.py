"""Options that several commands share: their types, checks, and the requests they make up.

A command is a frozen dataclass: its fields are its options, in the order of `--help`, and `run`
is what it does. Typer reads the options off the dataclass and builds it from the arguments. A
dataclass has the fields of its last base first.
"""

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from typer import Argument, Option

from medusa_chat import paths
from medusa_chat.checkpoints.precision import PRECISIONS
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.hub.catalog import repo_of
from medusa_chat.hub.dataset import dataset_files
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.presets import load_tree

DATA_FILES = (".json", ".jsonl", ".txt", ".parquet", ".csv", ".gz")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|mps")


def value(name: str, help: str, **checks: Any) -> Any:
    """An option with a value, which --help calls by `name`."""
    return Option(metavar=name, help=help, **checks)


def count(help: str, **limits: int) -> Any:
    """An option that is a whole number."""
    return value("N", help, **limits)


def file_path(help: str) -> Any:
    """An option that is the path of a file."""
    return value("FILE", help)


def folder_path(help: str) -> Any:
    """An option that is the path of a folder."""
    return value("DIR", help)


def flag(name: str, help: str) -> Any:
    """An option without a value, by its name, or by its name and that of its opposite."""
    return Option(name, help=help)


AsJson = Annotated[bool, flag("--json", "Print JSON.")]
TreeName = Annotated[str, value("auto|NAME|FILE", "Draft tree: a preset or a file.")]
PLACE = "ID|DIR|FILE"  # where a checkpoint or a backbone is: on the Hub, a folder, a GGUF file
Backbone = Annotated[str | None, value(PLACE, "Use this backbone, not the checkpoint's.")]


def of_hub(name: str) -> str:
    """An id as it is. Raises ModelError for the demo, which is neither fetched nor deleted."""
    if name == "demo":
        raise ModelError("demo ships with medusa-chat: it is always there, in the package")
    return name


HUB_ID = "Hub id: owner/name, or owner/name/FILE.gguf."
HubId = Annotated[str, Argument(metavar="ID", help=HUB_ID, callback=of_hub)]
Device = Annotated[str, value("auto|cpu|cuda[:N]|mps", "Device that runs the model.")]
Offline = Annotated[bool, flag("--offline", "Do not use the network.")]
DataDir = Annotated[
    Path | None, value("DIR", "Folder for settings, chats and caches.", file_okay=False)
]
# What follows the first file of --data: `--data a.json b.json`.
More = Annotated[list[str] | None, Argument(metavar="", hidden=True)]


@runtime_checkable
class Command(Protocol):
    """A command with its options."""

    def run(self) -> int | None:
        """Do it; the exit code, None for 0."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of every command that loads a model."""

    checkpoint: Annotated[
        str | None,
        value(PLACE, "Hub id, folder, GGUF file, smollm2. Default: the backbone, else the demo."),
    ] = None
    backbone: Backbone = None
    precision: Annotated[str, value("|".join(PRECISIONS), "Number format of the weights.")] = "auto"
    device: Device = "auto"
    max_context: Annotated[
        int | None, count("Context length: tokens of prompt and answer.", min=1)
    ] = None
    offline: Offline = False
    data_dir: DataDir = None

    def load_request(self) -> LoadRequest:
        """The request to load the model, after `prepare_process`. Raises UsageError."""
        prepare_process(self.device, self.data_dir, self.offline, self.precision)
        return LoadRequest(
            *named(self.checkpoint, self.backbone),
            self.precision,
            self.device,
            self.max_context,
            self.offline,
        )


@dataclass(frozen=True)
class ApiAccess:
    """Who may ask the API; options of `serve`, and of `ui` with --api."""

    api_key: Annotated[
        str, value("KEY", "Key that every request must carry.", envvar="MEDUSA_CHAT_API_KEY")
    ] = ""
    allow_origin: Annotated[
        list[str] | None, value("URL", "Let scripts of this site ask; * for all. Repeatable.")
    ] = None


def named(checkpoint: str | None, backbone: str | None) -> tuple[str, str | None]:
    """The checkpoint and the backbone to use with it: a backbone that is named alone is loaded
    alone, and without either it is the demo. The name of heads that ship means their base there."""
    if not checkpoint:
        return backbone or "demo", None
    return checkpoint, backbone and repo_of(backbone)


def values_of(options: type, command: object) -> dict[str, Any]:
    """Values of the fields of the dataclass `options` in a command that inherits them, by name."""
    return {field.name: getattr(command, field.name) for field in fields(options)}


def prepare_process(
    device: str = "auto",
    data_dir: Path | None = None,
    offline: bool = False,
    precision: str = "auto",
) -> None:
    """Check the names of precision and device; set the data folder and the offline mode for this
    process and its children.

    Call it before huggingface_hub is imported, which reads the offline mode only then. Raises
    UsageError.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if not DEVICE.fullmatch(device):
        raise UsageError(f"device is {device!r}: choose auto, cpu, cuda, cuda:N or mps")
    if data_dir is not None:
        paths.use_data_dir(data_dir)
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def refuse_unknown_tree(tree: str, nodes: int | None = None) -> None:
    """Refuse a tree before the model is loaded, which takes seconds. Raises UsageError."""
    if tree != "auto":
        load_tree(tree, nodes)


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
        is_path = name.startswith((".", "/", "~")) or path.suffix.lower() in DATA_FILES
        if is_path or name.count("/") != 1:
            raise UsageError(f"there is no file {name}: give a file, or a Hub data set OWNER/NAME")
        files += dataset_files(name)
    return tuple(files)
