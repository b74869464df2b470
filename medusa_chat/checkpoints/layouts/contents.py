"""Contents: the heads, backbone and adapter in a checkpoint, and what its config says of them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_chat.checkpoints.layouts.folders import (
    ADAPTERS,
    BackboneFiles,
    Folder,
    backbone_in,
    heads_in,
    refuse_misfits,
)
from medusa_chat.checkpoints.layouts.gguf_config import family_of, gguf_config
from medusa_chat.checkpoints.layouts.gguf_header import EMBEDDINGS, read_gguf
from medusa_chat.checkpoints.layouts.gguf_names import entries, renamed
from medusa_chat.checkpoints.layouts.heads_file import HeadsFile
from medusa_chat.checkpoints.layouts.settings_files import refuse_odd_config
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.checkpoints.layouts.text_splits import unknown_split
from medusa_chat.gguf_files import choose_file, parts_of


@dataclass(frozen=True)
class Contents:
    """What a source has. base: the backbone that heads without one name. adapter: the file of a
    LoRA adapter. notes: one sentence for each thing that is ignored."""

    name: str
    heads: HeadsFile | None
    backbone: BackboneFiles | None
    adapter: str | None
    base: str | None
    notes: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the heads are in the weights of their own backbone."""
        return (
            self.heads is not None and self.heads.layout in ("C", "F", "H") and bool(self.backbone)
        )

    @property
    def refuses_backbone(self) -> str:
        """Why it cannot use another backbone; empty if it can."""
        if self.is_whole:
            return "holds its own backbone, trained together with its heads: omit --backbone"
        if self.heads is None and self.adapter is None and self.backbone is not None:
            return "is a model without Medusa heads: name it or --backbone, not both"
        return ""


def survey(source: Source) -> Contents:
    """The contents of a source and its subfolders. Reads each config and header once, and no
    weights. Raises ModelError for broken heads."""
    heads, backbone, adapter = None, None, None
    config: Mapping[str, Any] = {}
    notes: list[str] = []
    for folder in _folders(source):
        folder_heads = heads_in(folder, backbone is not None) if heads is None else None
        whole = _backbone_in(folder, folder_heads) if backbone is None else None
        beside = folder.json("adapter_config.json")
        if folder_heads is not None:
            heads, config = folder_heads, beside | folder.json("config.json")
        backbone = backbone or whole
        if adapter is None and (name := next((a for a in ADAPTERS if a in folder.sizes), None)):
            adapter = folder.path(name)
            config = config or beside
        notes += folder.notes
    if heads is not None:
        heads = _with_config(heads, config, adapter)
    return Contents(source.name, heads, backbone, adapter, base_of(config), tuple(notes))


def backbone_of(source: Source) -> BackboneFiles | None:
    """The whole model in a source, ignoring heads."""
    return next(filter(None, (_backbone_in(folder, None) for folder in _folders(source))), None)


def place_in(source: Path, files: BackboneFiles) -> Path:
    """The path of a model: its subfolder, or its GGUF file (the first part of a split one)."""
    return source / files.folder / (files.files[0] if files.stored else "")


def _backbone_in(folder: Folder, heads: HeadsFile | None) -> BackboneFiles | None:
    return backbone_in(folder, heads) or gguf_in(folder)


def _with_config(heads: HeadsFile, config: Mapping[str, Any], adapter: str | None) -> HeadsFile:
    """The heads with what their config and an adapter beside them add."""
    layout = heads.layout
    if heads.is_whole and has_medusa_config(config):
        layout = "H"
    elif adapter is not None and not heads.is_whole:
        layout = "I"
    said = tuple(disagreements(config, heads))
    return replace(heads, layout=layout, base=base_of(config), disagreements=said)


def _folders(source: Source) -> list[Folder]:
    """The root, then its subfolders by name; deeper, only the folder of the chosen GGUF file."""
    sizes: dict[str, dict[str, int]] = {"": {}}
    deep = (choose_file(source.files())[0] or "").rpartition("/")[0]
    for path, size in source.files().items():
        folder, _, name = path.rpartition("/")
        if "/" not in folder or folder == deep:
            sizes.setdefault(folder, {})[name] = size
    return [Folder(source, folder, files) for folder, files in sorted(sizes.items())]


def gguf_in(folder: Folder) -> BackboneFiles | None:
    """The model in the source's GGUF file, if it is in this folder, otherwise None. Its config
    comes from the file; other files are ignored. Raises ModelError."""
    path, why = choose_file(folder.source.files())
    if path is None or path.rpartition("/")[0] != folder.folder:
        return None
    where = f"{folder.source.name}/{path}"
    header = read_gguf(folder.source, path)
    files = parts_of(path.rpartition("/")[2])
    config = gguf_config(header, folder.source, path)
    refuse_odd_config(config, where)
    family = family_of(header, where)
    names = renamed(header, family, where)
    refuse_misfits(entries(header, names, family), config, where)
    return BackboneFiles(
        folder=folder.folder,
        config=config,
        files=files,
        missing=(),
        bytes=sum(folder.sizes[file] for file in files),
        has_tokenizer=True,
        stored=header.quantisation,
        packed=header.packed_bytes(),
        table=header.packed_bytes(EMBEDDINGS),
        stacked=header.stacked,
        wide=header.wide_weights,
        notes=tuple(filter(None, (why, unknown_split(header.metadata)))),
    )


REPO = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
# a network share on Windows: opening one would reveal the user to its host
SHARE = re.compile(r"[\\/]([\\/]|\?\?)")
# the keys of various tools; the first that exists counts
HEADS = ("medusa_num_heads", "num_medusa_heads", "num_heads")
LAYERS = ("medusa_num_layers", "num_medusa_layers", "num_hidden_layers")


def base_of(config: Mapping[str, Any]) -> str | None:
    """The backbone that the config names; None for "N/A", and for a network share, which only the
    user may name."""
    base = config.get("base_model_name_or_path")
    base = base.strip() if isinstance(base, str) else ""
    if base.lower() not in ("", "n/a", "none", "null") and not SHARE.match(base):
        return base[:300]
    copied = config.get("_name_or_path")  # transformers' own, in a config that was copied whole
    return copied if isinstance(copied, str) and REPO.match(copied) else None


def disagreements(config: Mapping[str, Any], heads: HeadsFile) -> Iterator[str]:
    """A sentence for each point where the config differs from the file."""
    nested = _nested(config)
    is_model = nested is config and (heads.is_whole or config.get("model_type") != "medusa")
    for keys, count, what in ((HEADS, heads.heads, "heads"), (LAYERS, heads.layers, "layers")):
        # in a model's own config the plain keys count the model's heads and layers
        key = next((k for k in keys[: 2 if is_model else 3] if k in nested), None)
        if key is not None and nested[key] != count:
            yield f"config.json says {str(nested[key])[:20]} {what}, the file has {count}"
    version = str(config.get("version", ""))
    if version == "2" and heads.lm != "shared":
        yield "config.json says version 2 (no LM heads), the file has LM heads of its own"
    if version == "1" and heads.lm == "shared":
        yield "config.json says version 1 (own LM heads), the file has none"
    if isinstance(config.get("hidden_size"), int) and config["hidden_size"] != heads.hidden:
        yield f"config.json says hidden size {config['hidden_size']}, the file has {heads.hidden}"
    if config.get("medusa_fc_bias") is False and heads.bias:
        yield "config.json says no bias, the file has one"


def has_medusa_config(config: Mapping[str, Any]) -> bool:
    """Whether a model's config keeps what it says about heads in `medusa_config`."""
    return isinstance(config.get("medusa_config"), dict)


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("medusa_config", "medusa"):
        if isinstance(config.get(key), dict):
            return config[key]
    return config
