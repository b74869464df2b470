"""Options that several commands share: their types, their checks and the load request.

A command is a frozen dataclass: its fields are its options, in the order of `--help`, and `run`
executes it. Typer builds the dataclass from the arguments. The fields of the last base class come
first.
"""

import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from typer import Argument, Option

from medusa_chat import paths
from medusa_chat.checkpoints.memory_needs import PRECISIONS
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.hub.catalog import repo_of
from medusa_chat.hub.dataset import dataset_files
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.presets import load_tree

DATA_FILES = (".json", ".jsonl", ".txt", ".parquet", ".csv", ".gz")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|mps")


def value(name: str, help: str, **checks: Any) -> Any:
    """An option with a value; `name` is its placeholder in --help."""
    return Option(metavar=name, help=help, **checks)


def count(help: str, **limits: int) -> Any:
    """An option whose value is an integer."""
    return value("N", help, **limits)


def file_path(help: str) -> Any:
    """An option whose value is the path of a file."""
    return value("FILE", help)


def folder_path(help: str) -> Any:
    """An option whose value is the path of a folder."""
    return value("DIR", help)


def flag(name: str, help: str) -> Any:
    """An option without a value: "--name" or "--name/--no-name"."""
    return Option(name, help=help)


AsJson = Annotated[bool, flag("--json", "Print JSON.")]
TreeName = Annotated[str, value("auto|NAME|FILE", "Draft tree: a preset or a file.")]
PLACE = "ID|DIR|FILE"  # a checkpoint or backbone: its Hub id, folder or GGUF file
Backbone = Annotated[str | None, value(PLACE, "Backbone to use instead of the checkpoint's.")]


def hub_id(name: str) -> str:
    """Returns the id. Raises ModelError for the demo, which is not on the Hub."""
    if name == "demo":
        raise ModelError("the demo is part of medusa-chat: it is neither downloaded nor removed")
    return name


HubId = Annotated[
    str,
    Argument(metavar="ID", help="Hub id: owner/name, or owner/name/FILE.gguf.", callback=hub_id),
]
Device = Annotated[str, value("auto|cpu|cuda[:N]|mps", "Device for the model.")]
Offline = Annotated[bool, flag("--offline", "Do not use the network.")]
DataDir = Annotated[
    Path | None, value("DIR", "Folder for settings, chats and caches.", file_okay=False)
]
# The files after the first in `--data a.json b.json`.
More = Annotated[list[str] | None, Argument(metavar="", hidden=True)]


@runtime_checkable
class Command(Protocol):
    """A command with its options."""

    def run(self) -> int | None:
        """Execute the command; returns the exit code, None for 0."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of every command that loads a model."""

    checkpoint: Annotated[
        str | None,
        value(
            PLACE,
            "Hub id, folder, GGUF file, smollm2, qwen-coder. Default: backbone, else demo.",
        ),
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
        """Prepare this process, and return the request to load the model. Raises UsageError."""
        prepare_process(self.device, self.data_dir, self.offline, self.precision)
        return LoadRequest(
            *named(self.checkpoint, self.backbone),
            self.precision,
            self.device,
            self.max_context,
            self.offline,
        )


@dataclass(frozen=True)
class DraftOptions(LoadOptions):
    """Options of every command that decodes."""

    draft: Annotated[
        list[str] | None,
        value(PLACE, "Smaller model with the same tokenizer, which drafts; twice: both do."),
    ] = None

    def load_request(self) -> LoadRequest:
        """See LoadOptions."""
        return replace(super().load_request(), drafts=tuple(self.draft or ()))


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
    """The checkpoint to load, and the backbone to use instead of its own, if any.

    A backbone without a checkpoint is loaded by itself; without either it is the demo. As a
    backbone, the name of shipped heads means the model they were trained for.
    """
    if not checkpoint:
        return backbone or "demo", None
    return checkpoint, backbone and repo_of(backbone)


def values_of(options: type, command: object) -> dict[str, Any]:
    """The values that a command has for the fields of the dataclass `options`, by name."""
    return {field.name: getattr(command, field.name) for field in fields(options)}


def prepare_process(
    device: str = "auto",
    data_dir: Path | None = None,
    offline: bool = False,
    precision: str = "auto",
) -> None:
    """Check precision and device; set data folder and offline mode for this process and its
    children.

    Call it before huggingface_hub is imported, which reads its environment only then. Raises
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
    """Raises UsageError for an unknown tree, before the model is loaded."""
    if tree != "auto":
        load_tree(tree, nodes)


def data_paths(data: list[str] | None, more: list[str] | None) -> tuple[Path, ...]:
    """Local files, and the files of datasets on the Hub. Raises UsageError, HubError."""
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
            raise UsageError(
                f"there is no file {name}: give a file, or a dataset on the Hub as OWNER/NAME"
            )
        files += dataset_files(name)
    return tuple(files)
