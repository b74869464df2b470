"""Names: of repos and revisions, and which files matter: Medusa heads, a backbone's weights."""

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

HEADS = re.compile(r"medusa_lm_head[\w.-]*\.(safetensors|pt|bin)")
ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
SINGLE = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
INDEX = {kind: f"{name}.index.json" for kind, name in SINGLE.items()}
SHARD = {
    "safetensors": re.compile(r"model-\d+-of-(\d+)\.safetensors"),
    "bin": re.compile(r"pytorch_model-\d+-of-(\d+)\.bin"),
}
# What else a backbone is read from. No code, no original/*.pth, no optimizer.
BESIDE = re.compile(
    r"(config|generation_config|hf_quant_config|quantize_config|quantization_config|"
    r"tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template|vocab)\.json|"
    r"tokenizer\.model|spiece\.model|sentencepiece\.bpe\.model|merges\.txt|vocab\.txt|"
    r"[\w-]+\.jinja"
)
OF_HEADS = re.compile(r"(config|adapter_config|medusa_[\w-]+)\.json")
MAX_NAME = 500
COMMIT = re.compile(r"[0-9a-f]{40}")
REPO_ID = re.compile(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?", re.ASCII)


def is_repo_id(name: object) -> bool:
    """Whether `name` could be a repo of the Hub: "owner/name", or the "name" of an old one."""
    return (
        isinstance(name, str)
        and REPO_ID.fullmatch(name) is not None
        and not re.search(r"--|\.\.|\.git$|[.-]$|[.-]/", name)
    )


def is_safe(name: object) -> bool:
    """Whether a repo's file name stays inside the folder it is written to, on every system."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        return False
    parts = name.split("/")
    return not re.search(r'[\\:*?"<>|]', name) and not {"", ".", ".."} & set(parts)


def heads_files(names: Iterable[str]) -> tuple[str, ...]:
    """The files of Medusa heads, one format for each folder: safetensors before pickles."""
    found = [name for name in sorted(names) if HEADS.fullmatch(PurePosixPath(name).name)]
    return _one_format(found)


def adapter_files(names: Iterable[str]) -> tuple[str, ...]:
    """The weights of LoRA adapters, one format for each folder."""
    return _one_format([n for n in sorted(names) if ADAPTER.fullmatch(PurePosixPath(n).name)])


def weight_files(names: Iterable[str], index: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """A backbone's weights with their index, of one format: safetensors before .bin.

    index: the content of index_file(names), where there is one; it decides which shards belong.
    Empty where the repo holds no weights that can be used.
    """
    folder, inside = _backbone(names)
    return tuple(folder + name for name in _weights(inside, index))


def config_file(names: Iterable[str]) -> str:
    """The config.json that belongs to weight_files; it need not be among the names."""
    return f"{_backbone(names)[0]}config.json"


def index_file(names: Iterable[str]) -> str | None:
    """The index that weight_files would go by; None where one file holds all."""
    folder, inside = _backbone(names)
    found = _weights(inside)
    return folder + found[-1] if found and found[-1] in INDEX.values() else None


def _backbone(names: Iterable[str]) -> tuple[str, set[str]]:
    """The folder that holds a backbone ("" for the root, else "base/") and the names in it.

    The root where it has weights, else the only folder below that has some.
    """
    folders: dict[str, set[str]] = {"": set()}
    for name in names:
        folder, slash, rest = name.rpartition("/")
        folders.setdefault(folder + slash, set()).add(rest)
    found = [folder for folder in folders if _weights(folders[folder])]
    chosen = found[0] if len(found) == 1 else ""
    return ("", folders[""]) if "" in found else (chosen, folders[chosen])


def _weights(names: set[str], index: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """An index whose files are there decides, before a single file that lies beside it."""
    for kind, single in SINGLE.items():
        shards = {name for name in names if SHARD[kind].fullmatch(name)}
        listed = shards_of(index) if index is not None else frozenset()
        has_index = INDEX[kind] in names
        if single in names and not (has_index and shards and (listed or shards) <= names):
            return (single,)
        if has_index:
            return (*sorted(listed or shards), INDEX[kind])
        if shards:
            return tuple(sorted(shards))
    return ()


def shards_of(index: Mapping[str, Any]) -> frozenset[str]:
    """The files that an index names; empty where it is no index."""
    table = index.get("weight_map") if isinstance(index, Mapping) else None
    return frozenset(map(str, table.values())) if isinstance(table, Mapping) else frozenset()


def backbone_files(names: Iterable[str], index: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Everything a backbone is read from: weights, config, tokenizer, generation config."""
    folder, inside = _backbone(names)
    beside = sorted(folder + name for name in inside if BESIDE.fullmatch(name))
    return (*weight_files(names, index), *beside)


def files_of_heads(names: Iterable[str]) -> tuple[str, ...]:
    """Everything heads are read from: the heads, their config, a LoRA adapter, a calibration."""
    names = set(names)
    folders = {str(PurePosixPath(name).parent) for name in heads_files(names)} | {"."}
    beside = [
        name
        for name in sorted(names)
        if OF_HEADS.fullmatch(PurePosixPath(name).name)
        and str(PurePosixPath(name).parent) in folders
    ]
    return (*heads_files(names), *adapter_files(names), *beside)


def says_medusa(config: object) -> bool:
    """Whether a config.json speaks of Medusa heads, in any of the ways that are in use."""
    if not isinstance(config, Mapping):
        return False
    names = {"medusa_num_heads", "medusa_num_layers", "medusa_config"}
    inner = isinstance(config.get("medusa"), Mapping)
    return bool(names & set(config)) or inner or config.get("model_type") == "medusa"


def index_has_heads(index: object) -> bool:
    """Whether an index lists Medusa heads among its tensors."""
    table = index.get("weight_map") if isinstance(index, Mapping) else None
    return isinstance(table, Mapping) and any(
        str(name).startswith(("medusa_head.", "medusa_heads.")) for name in table
    )


def _one_format(found: list[str]) -> tuple[str, ...]:
    folders: dict[str, list[str]] = {}
    for name in found:
        folders.setdefault(str(PurePosixPath(name).parent), []).append(name)
    chosen: list[str] = []
    for group in folders.values():
        safe = [name for name in group if name.endswith(".safetensors")]
        chosen += safe or group[:1]
    return tuple(sorted(chosen))
