"""A backbone written without the heads among its files, for programs that read them all."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.weights import weight_files
from medusa_chat.trees.calibration import CALIBRATION_FILE

SETTINGS = (".json", ".jinja", ".model", ".txt")  # endings of what stands beside the weights
INDEX = ".index.json"


def has_heads_beside(found: Checkpoint) -> bool:
    """Whether heads lie in the folder of their backbone, or in its weights."""
    if found.heads is None:
        return False
    return (found.folder / found.heads.files[0]).parent.resolve() == found.backbone.resolve()


def write_plain_backbone(folder: Path, found: Checkpoint) -> None:
    """Write the backbone of a checkpoint into a new folder: the settings as they are, the weights
    as safetensors, file by file, without the tensors of the heads. Raises OSError and
    SafetensorError."""
    folder.mkdir()
    for file in sorted(found.backbone.iterdir()):
        is_setting = file.suffix in SETTINGS and not file.name.endswith(INDEX)
        if is_setting and file.is_file() and file.name != CALIBRATION_FILE:
            shutil.copyfile(file, folder / file.name)
    places: dict[str, str] = {}
    for file in weight_files(found):
        kept = _without_heads(folder / file.name, file, found)
        places |= dict.fromkeys(kept, file.name)
    if set(places.values()) != {"model.safetensors"}:
        index = {"metadata": {}, "weight_map": places}
        (folder / f"model.safetensors{INDEX}").write_text(json.dumps(index), "utf-8")


def _without_heads(target: Path, file: Path, found: Checkpoint) -> list[str]:
    """Write the file's tensors that are none of the heads; their names."""
    assert found.heads is not None
    heads = {name for _, name in found.heads.tensors.values()} if found.heads.is_whole else set()
    tensors = {name: t for name, t in load_file(file).items() if name not in heads}
    if tensors:
        save_file(tensors, target, {"format": "pt"})
    return list(tensors)
