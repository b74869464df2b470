"""The work folder of an unfinished training, beside its output until that is written."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.paths import can_write
from medusa_chat.training.checkpoint_writer import write_json
from medusa_chat.training.recipe import TrainRequest

REQUEST = "request.json"


def work_folder(output: Path) -> Path:
    """The folder with the state of an unfinished training."""
    return output.with_name(f"{output.name}.training")


def begin_training(request: TrainRequest, folder: Path) -> None:
    """Make the work folder, with the request in it. Raises UsageError where the output exists, and
    where --resume, the folder and its request do not fit together."""
    output = request.output
    if output.exists():
        raise UsageError(f"{output} exists: give another --output, or move it away")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"{output} cannot be written: create its parent folder first")
    if not can_write(output.resolve().parent):
        raise UsageError(f"{output} cannot be written: you may not write in its parent folder")
    if holds_work(folder) and not request.resume:
        raise UsageError(f"{folder} holds an unfinished training: add --resume, or remove it")
    if request.resume and not folder.exists():
        raise UsageError(f"there is nothing to resume at {folder}: omit --resume")
    file = folder / REQUEST
    shown = _request_json(request)
    if file.exists() and request.resume:
        before = json.loads(file.read_text("utf-8"))
        for key, value in shown.items():
            if before.get(key) != value:
                what = "recipe" if key == "name" else key.removeprefix("explicit ")
                raise UsageError(
                    f"{folder} was started with another {what.replace('_', ' ')} "
                    f"({before.get(key)}, not {value}): give the same options and data, or remove "
                    "it"
                )
    folder.mkdir(exist_ok=True)
    write_json(file, shown)


def holds_work(folder: Path) -> bool:
    """Whether anything was done there, or is there that is not ours; the request alone is no
    work."""
    return folder.exists() and any(file.name != REQUEST for file in folder.iterdir())


def end_training(folder: Path) -> None:
    """After a training that was refused or failed: what was done stays, else nothing does."""
    if folder.is_dir() and not holds_work(folder):
        (folder / REQUEST).unlink(missing_ok=True)
        folder.rmdir()


def _digest(path: Path) -> str:
    """What tells one content of a file from another. Raises UsageError."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _request_json(request: TrainRequest) -> dict[str, Any]:
    """The values that a resumed training must share."""
    chosen = asdict(request.recipe)
    data = [f"{path.resolve()} ({_digest(path)})" for path in request.data]
    asked = {"backbone": request.backbone, "precision": request.precision}
    length = {"explicit sequence_length": request.sequence_length}
    return asked | {"data": data} | length | chosen
