"""Checkpoint: where the parts of a model lie: its heads, its backbone, its adapter, its tree."""

import os
from dataclasses import dataclass
from pathlib import Path

from medusa_chat import hub
from medusa_chat.checkpoints.layouts.contents import Contents, backbone_of, survey
from medusa_chat.checkpoints.layouts.declared import REPO
from medusa_chat.checkpoints.layouts.folders import MODEL, BackboneFiles
from medusa_chat.checkpoints.layouts.heads_file import HeadsFile
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.errors import ModelError
from medusa_chat.hub.catalog import model_preset
from medusa_chat.messages import LoadRequest
from medusa_chat.paths import asset
from medusa_chat.trees.calibration import CALIBRATION_FILE

HEADS_FILE = "medusa_lm_head.safetensors"  # the name under which we write heads


@dataclass(frozen=True)
class Checkpoint:
    """Where the parts of a model lie; heads, adapter, calibration: None where there are none.

    folder: what the heads' and the adapter's files are named in. backbone: a folder with config,
    tokenizer and the files of `weights`. base: the Hub id of the backbone, or the one that is
    named beside a local one. notes: a sentence for each thing that was decided.
    """

    name: str
    folder: Path
    backbone: Path
    weights: BackboneFiles
    heads: HeadsFile | None
    adapter: Path | None
    calibration: Path | None
    notes: tuple[str, ...] = ()
    base: str | None = None

    @classmethod
    def find(cls, request: LoadRequest) -> "Checkpoint":
        """Find the parts on disk or in the Hub's cache; what is missing is downloaded unless the
        request is offline. Raises ModelError, with what to do."""
        return SurveyedFolder.of(request, request.offline).locate()


@dataclass(frozen=True)
class SurveyedFolder:
    """A checkpoint's own folder, surveyed, and where its backbone is: a folder or a Hub id."""

    request: LoadRequest
    folder: Path
    contents: Contents
    backbone: Path | str

    @classmethod
    def of(cls, request: LoadRequest, offline: bool) -> "SurveyedFolder":
        """Survey the checkpoint that a request names. Raises ModelError, with what to do."""
        folder = _folder(request.checkpoint, offline)
        contents = survey(LocalFolder(folder))
        return cls(request, folder, contents, _backbone_place(request, folder, contents))

    def locate(self) -> Checkpoint:
        """All parts, the backbone's folder surveyed where it is another one. Raises ModelError."""
        folder, contents, where = self.folder, self.contents, self.backbone
        place = where if isinstance(where, Path) else _from_hub(where, self.request.offline)
        weights = contents.backbone if place == folder else backbone_of(LocalFolder(place))
        if weights is None:
            raise ModelError(_no_backbone(place))
        _require_files(place, weights)
        adapter, notes = contents.adapter, list(contents.notes)
        if adapter is not None and place == folder:
            notes.append(f"{adapter} is ignored: the folder holds a whole model")
            adapter = None
        if contents.heads is not None:
            notes += contents.heads.disagreements
        calibration = folder / CALIBRATION_FILE
        return Checkpoint(
            name=self.request.checkpoint,
            folder=folder,
            backbone=place / weights.folder,
            weights=weights,
            heads=contents.heads,
            adapter=folder / adapter if adapter else None,
            calibration=calibration if calibration.is_file() else None,
            notes=tuple(notes),
            base=where if isinstance(where, str) else _base(self.request, contents),
        )


def _backbone_place(request: LoadRequest, folder: Path, found: Contents) -> Path | str:
    """The one that --backbone names, else the checkpoint itself, else the base that it names: a
    folder, or a Hub id."""
    if request.backbone and found.is_whole:
        raise ModelError(
            f"{request.checkpoint} holds its own backbone, trained together with its heads: leave "
            "--backbone out"
        )
    if request.backbone:
        return folder_or_repo(request.backbone)
    if found.backbone is not None:
        return folder
    base = _base(request, found)
    if base is not None:
        return _base_place(base, request, folder)
    if found.heads is None or _has_model(folder, found.heads):
        raise ModelError(_no_backbone(folder))
    raise ModelError(
        f"{request.checkpoint} has only Medusa heads and does not name a backbone: "
        f"give --backbone ID|DIR, a model of hidden size {found.heads.hidden}"
    )


def _base(request: LoadRequest, found: Contents) -> str | None:
    """The base that a checkpoint belongs to: a preset knows better than a config."""
    preset = model_preset(request.checkpoint)
    return preset.base if preset and preset.base else found.base


def _base_place(base: str, request: LoadRequest, folder: Path) -> Path | str:
    """The backbone that a checkpoint names: a folder beside it where it is itself a folder of the
    user's, else a Hub id."""
    if _is_folder(Path(request.checkpoint).expanduser()):
        for place in (folder / base, folder.parent / base):
            if _is_folder(place):
                return place.resolve()
    if not REPO.match(base):
        raise ModelError(
            f"{request.checkpoint} names the backbone {base[:80]!r}, which is neither a folder "
            "beside it nor a Hub id: give --backbone ID|DIR"
        )
    return base


def _has_model(folder: Path, heads: HeadsFile) -> bool:
    """Whether there are weights of a model beside the heads, though nothing to load them by."""
    return any(MODEL.match(f.name) and f.name not in heads.files for f in folder.iterdir())


def _no_backbone(folder: Path) -> str:
    config = folder / "config.json"
    if not config.is_file():
        return (
            f"{folder} holds no config.json: give a folder with a transformers model, or "
            "--backbone for a folder that holds only Medusa heads"
        )
    if any(MODEL.match(file.name) for file in folder.iterdir()):
        return f"{config} has no model_type: it is not the config of a transformers model"
    return f"{folder} holds no weights beside its config.json: it is incomplete, fetch it again"


def _require_files(place: Path, weights: BackboneFiles) -> None:
    if weights.missing:
        more = f" and {len(weights.missing) - 1} more" if len(weights.missing) > 1 else ""
        raise ModelError(
            f"{place / weights.folder} lacks {weights.missing[0]}{more}: it is incomplete, "
            "fetch it again"
        )
    if not weights.has_tokenizer:
        raise ModelError(f"{place / weights.folder} holds no tokenizer: it is incomplete")


def open_here(name: str) -> LocalFolder:
    """The files of "demo", of a folder, or of a Hub repo that is in the cache. Raises ModelError;
    the network is never used."""
    return LocalFolder(_folder(name, offline=True), name)


def folder_or_repo(name: str) -> Path | str:
    """The folder that a checkpoint's or backbone's name means, else the name as a Hub id. Raises
    ModelError for what can be neither."""
    if name == "demo":
        folder = asset("demo")
        if not (folder / "config.json").is_file():
            raise ModelError(f"the demo checkpoint is missing from {folder}: install again")
        return folder
    path = Path(name or "/").expanduser()
    if name and _is_folder(path):
        return path
    if not name.isprintable() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(_no_such(name))
    return name


def _no_such(name: str) -> str:
    path = Path(name or "/").expanduser()
    if name.isprintable() and os.path.isfile(path):
        return f"{name} is a file: give the folder that holds the checkpoint"
    if name.isprintable() and name.startswith((".", "/", "~")):
        return f"there is no folder {name}: check the path"
    return f"{name[:80]!r} is not a checkpoint: give a folder, a Hub id (owner/name) or demo"


def _folder(name: str, offline: bool) -> Path:
    place = folder_or_repo(name)
    return place if isinstance(place, Path) else _from_hub(place, offline)


def _is_folder(path: Path) -> bool:
    """Path.is_dir, and False for a name that no folder can have (null bytes, too long)."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _from_hub(name: str, offline: bool) -> Path:
    """The Hub repo in the local cache, downloaded unless offline."""
    return hub.resolve(name, offline)
