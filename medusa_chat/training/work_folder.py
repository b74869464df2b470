"""The work folder of an unfinished training, beside its output until that is written."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medusa_chat import paths
from medusa_chat.errors import UsageError
from medusa_chat.training.recipe import TrainRequest

REQUEST = "request.json"
LOCK = "lock"


def work_folder(output: Path) -> Path:
    """The folder with the state of an unfinished training."""
    return output.with_name(f"{output.name}.training")


@contextmanager
def begun(request: TrainRequest, folder: Path) -> Iterator[None]:
    """Hold the work folder, with the request in it. What was done there stays after an error, else
    nothing does. Raises UsageError where the output exists, where another training holds the
    folder, and where --resume, the folder and its request do not fit together."""
    output = request.output
    if output.exists():
        raise UsageError(f"{output} exists: give another --output, or move it away")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"{output} cannot be written: create its parent folder first")
    if not paths.can_write(output.resolve().parent):
        raise UsageError(f"{output} cannot be written: you may not write in its parent folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give another --output, or move it away")
    if request.resume and not folder.exists():
        raise UsageError(f"there is nothing to resume at {folder}: omit --resume")
    folder.mkdir(exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{folder} belongs to a training that runs: end that one first") from None
    try:
        _write_request(request, folder)
        yield
    except Exception:
        if not _holds_work(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock.release()


def _write_request(request: TrainRequest, folder: Path) -> None:
    if _holds_work(folder) and not request.resume:
        raise UsageError(f"{folder} holds an unfinished training: add --resume, or remove it")
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
    paths.write_text(file, json.dumps(shown, indent=2) + "\n")


def _holds_work(folder: Path) -> bool:
    """Whether anything was done there, or is there that is not ours; the request alone is no
    work."""
    return any(file.name not in (REQUEST, LOCK) for file in folder.iterdir())


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
