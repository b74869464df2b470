"""Checkpoint: where the parts of a model are: its heads, backbone, adapter and tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_chat.checkpoints.layouts.contents import REPO, Contents, backbone_of, place_in, survey
from medusa_chat.checkpoints.layouts.folders import MODEL, BackboneFiles
from medusa_chat.checkpoints.layouts.heads_file import HeadsFile
from medusa_chat.checkpoints.places import (
    folder_of,
    folder_or_repo,
    from_hub,
    is_folder,
    is_gguf_file,
    opened,
    place_of,
)
from medusa_chat.checkpoints.shipped_heads import explaining_backbone, shipped_heads
from medusa_chat.errors import ModelError
from medusa_chat.gguf_files import split_name
from medusa_chat.hub.catalog import KnownTemplate, ModelPreset, known_template, model_preset
from medusa_chat.messages import LoadPhase, LoadRequest
from medusa_chat.trees.calibration import CALIBRATION_FILE

HEADS_FILE = "medusa_lm_head.safetensors"  # our name for a file of heads
News = tuple[LoadPhase, None]  # of a download


@dataclass(frozen=True)
class Checkpoint:
    """Where the parts of a model are; heads, adapter, calibration: None where there are none.

    folder: with the files of heads and adapter. backbone: a folder with config, tokenizer and the
    files of `weights`, or with a GGUF file that holds all of them. notes: a sentence for each
    decision. template: the chat template that we have for the checkpoint's id or its base's, if
    any. repo: the backbone's Hub id, with its GGUF file if one was named. written: a folder with
    the settings of a GGUF file. is_own: whether the checkpoint is itself the backbone.
    """

    name: str
    folder: Path
    backbone: Path
    weights: BackboneFiles
    heads: HeadsFile | None
    adapter: Path | None
    calibration: Path | None
    notes: tuple[str, ...] = ()
    template: KnownTemplate | None = None
    repo: str | None = None
    written: Path | None = None
    is_own: bool = False

    @property
    def source(self) -> Path:
        """The backbone: a folder, or a GGUF file."""
        return self.backbone / self.weights.files[0] if self.weights.stored else self.backbone

    @property
    def settings(self) -> Path:
        """The folder with the backbone's config and tokenizer."""
        return self.written or self.backbone

    @property
    def base(self) -> str:
        """The backbone that the heads belong to, by its Hub id or its path; empty where it is the
        checkpoint itself."""
        return "" if self.is_own else self.repo or str(self.source.resolve())

    @classmethod
    def find(cls, request: LoadRequest) -> "Checkpoint":
        """Find the parts on disk or in the Hub's cache, without the network (fetch.py downloads
        what is missing). Raises ModelError, with what to do."""
        surveyed = SurveyedFolder.of(request, place_of(request.checkpoint))
        where = surveyed.backbone
        with explaining_backbone(surveyed.preset):
            place = where if isinstance(where, Path) else from_hub(where)
        return surveyed.locate(place)


@dataclass(frozen=True)
class SurveyedFolder:
    """A checkpoint's own folder or GGUF file with its contents, and its backbone: a path or a Hub
    id. preset: None for a checkpoint that we have no preset for."""

    request: LoadRequest
    preset: ModelPreset | None
    place: Path
    contents: Contents
    backbone: Path | str

    @classmethod
    def of(cls, request: LoadRequest, place: Path) -> "SurveyedFolder":
        """Survey the checkpoint that a request names. Raises ModelError, with what to do."""
        contents = survey(opened(place))
        preset = model_preset(request.checkpoint)
        base = _base(preset, contents)
        where = _backbone_place(request, place, contents, base)
        return cls(request, preset, place, contents, where)

    def locate(self, place: Path, needs_tokenizer: bool = True) -> Checkpoint:
        """All parts. place: the backbone's, whose contents are read if it is another folder.
        needs_tokenizer: whether one without is refused. Raises ModelError."""
        contents, where = self.contents, self.backbone
        is_own = place == self.place
        weights = contents.backbone if is_own else backbone_of(opened(place))
        place = folder_of(place)
        if weights is None:
            raise ModelError(_no_backbone(place))
        _require_files(place, weights, needs_tokenizer)
        adapter, notes = contents.adapter, [*contents.notes, *weights.notes]
        if adapter is not None and is_own:
            notes.append(f"{adapter} is ignored: the folder holds a whole model")
            adapter = None
        heads, folder, told = self._heads(weights if is_own else None)
        calibration = folder / CALIBRATION_FILE
        base = where if isinstance(where, str) else _base(self.preset, contents)
        return Checkpoint(
            name=self.request.checkpoint,
            folder=folder,
            backbone=place / weights.folder,
            weights=weights,
            heads=heads,
            adapter=folder / adapter if adapter else None,
            calibration=calibration if calibration.is_file() else None,
            notes=(*notes, *told),
            template=known_template(self.request.checkpoint, base),
            repo=_repo(where, self.request.checkpoint if is_own else ""),
            is_own=is_own,
        )

    def _heads(self, own: BackboneFiles | None) -> tuple[HeadsFile | None, Path, Sequence[str]]:
        """The heads, their folder and notes on them: the checkpoint's own, otherwise those that
        ship with medusa-chat for its backbone."""
        heads, folder = self.contents.heads, folder_of(self.place)
        if heads is not None:
            return heads, folder, heads.disagreements
        if own is not None and self.contents.adapter is None:
            name, where = self.request.checkpoint, place_in(folder, own)
            shipped = shipped_heads(name, own.config, where)
            if shipped is not None:
                return shipped.heads, shipped.folder, (shipped.note,)
        return None, folder, ()


def _repo(where: Path | str, name: str) -> str | None:
    """The Hub id of a backbone, or None. name: of the checkpoint that holds it."""
    place = folder_or_repo(name) if isinstance(where, Path) and name else where
    return place if isinstance(place, str) else None


def _backbone_place(
    request: LoadRequest, place: Path, contents: Contents, base: str | None
) -> Path | str:
    """The backbone that --backbone names, otherwise the checkpoint itself, otherwise its base: a
    folder, a GGUF file, or a Hub id."""
    if request.backbone and (why := contents.refuses_backbone):
        raise ModelError(f"{request.checkpoint} {why}")
    if request.backbone:
        return folder_or_repo(request.backbone)
    if contents.backbone is not None:
        return place
    folder = folder_of(place)
    if base is not None:
        return _base_place(base, request, folder)
    if contents.heads is None or _has_model(folder, contents.heads):
        raise ModelError(_no_backbone(folder))
    raise ModelError(
        f"{request.checkpoint} has only Medusa heads and does not name their backbone: "
        f"give --backbone ID|DIR, a model of hidden size {contents.heads.hidden}"
    )


def _base(preset: ModelPreset | None, contents: Contents) -> str | None:
    """The base model of a checkpoint: a preset takes precedence over its config."""
    return preset.base if preset and preset.base else contents.base


def _base_place(base: str, request: LoadRequest, folder: Path) -> Path | str:
    """The backbone that a checkpoint names: a folder or GGUF file beside it if the checkpoint is a
    local folder, otherwise a Hub id."""
    if is_folder(Path(request.checkpoint).expanduser()):
        for place in (folder / base, folder.parent / base):
            if is_folder(place) or is_gguf_file(place):
                return place.resolve()
    if not REPO.match(split_name(base)[0]):
        raise ModelError(
            f"{request.checkpoint} names the backbone {base[:80]!r}, which is neither a folder "
            "beside it nor a Hub id: give --backbone ID|DIR"
        )
    return base


def _has_model(folder: Path, heads: HeadsFile) -> bool:
    """Whether the folder has weights of a model beside the heads, but no config to load them."""
    return any(MODEL.match(f.name) and f.name not in heads.files for f in folder.iterdir())


def _no_backbone(folder: Path) -> str:
    config = folder / "config.json"
    if not config.is_file():
        return (
            f"{folder} has no config.json: give a folder with a transformers model or a GGUF "
            "file, or --backbone for a folder that has only Medusa heads"
        )
    if any(MODEL.match(file.name) for file in folder.iterdir()):
        return f"{config} has no model_type: it is not the config of a transformers model"
    return f"{folder} has a config.json but no weights: it is incomplete, download it again"


def _require_files(place: Path, weights: BackboneFiles, needs_tokenizer: bool) -> None:
    if weights.missing:
        more = f" and {len(weights.missing) - 1} more" if len(weights.missing) > 1 else ""
        raise ModelError(
            f"{place / weights.folder} lacks {weights.missing[0]}{more}: it is incomplete, "
            "download it again"
        )
    if needs_tokenizer and not weights.has_tokenizer:
        raise ModelError(
            f"{place / weights.folder} has no tokenizer: it is incomplete, download it again"
        )
