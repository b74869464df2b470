"""The folder of an unfinished training: beside its output, until that is written."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.training.checkpoint_writer import write_json
from medusa_chat.training.recipe import TrainRequest


def work_folder(output: Path) -> Path:
    """Where the state of an unfinished training lies, beside its output."""
    return output.with_name(f"{output.name}.training")


def begin_training(request: TrainRequest, work: Path) -> None:
    """Refuse what is in the way, and note what this training is. Raises UsageError."""
    output = request.output
    if output.exists():
        raise UsageError(f"{output} exists: give another --output, or move it away")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"cannot write {output}: its folder does not exist")
    if work.exists() and not request.resume:
        raise UsageError(f"{work} holds an unfinished training: add --resume, or remove it")
    if request.resume and not work.exists():
        raise UsageError(f"there is nothing to resume at {work}: leave --resume out")
    file = work / "request.json"
    shown = _request_json(request)
    if file.exists():
        before = json.loads(file.read_text("utf-8"))
        for key, value in shown.items():
            if before.get(key) != value:
                raise UsageError(
                    f"{work} was begun with {key} {before.get(key)}, now it is {value}: give the "
                    "same options, or remove it"
                )
    work.mkdir(exist_ok=True)
    write_json(file, shown)


def _request_json(request: TrainRequest) -> dict[str, Any]:
    """What must be the same when a training goes on."""
    chosen = asdict(request.recipe)
    data = [str(path.resolve()) for path in request.data]
    asked = {"backbone": request.backbone, "precision": request.precision}
    length = {"explicit sequence_length": request.sequence_length}
    return asked | {"data": data} | length | chosen
