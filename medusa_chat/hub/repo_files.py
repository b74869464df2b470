"""Which of a repo's files matter, by their names: Medusa heads, a backbone's weights and config."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

HEADS = re.compile(r"medusa_lm_head[\w.-]*\.(safetensors|pt|bin)")
ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
# Weights in one file -> the names of their shards; the index is FILE.index.json.
WEIGHTS = {
    "model.safetensors": re.compile(r"model-\d+-of-\d+\.safetensors"),
    "pytorch_model.bin": re.compile(r"pytorch_model-\d+-of-\d+\.bin"),
}
HYDRA = "hydra_lm_head.pt"  # the weights of Hydra's heads
# Other files of a backbone. No code, no original/*.pth, no optimizer.
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
    """Whether `name` is a valid repo id: "owner/name", or the "name" of an old repo."""
    return (
        isinstance(name, str)
        and REPO_ID.fullmatch(name) is not None
        and not re.search(r"--|\.\.|\.git$|[.-]$|[.-]/", name)
    )


def is_safe(name: object) -> bool:
    """Whether a file name stays inside the folder it is written to, on every system."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        return False
    return not re.search(r'[\\:*?"<>|]', name) and not {"", ".", ".."} & set(name.split("/"))


def heads_files(names: Iterable[str]) -> tuple[str, ...]:
    """The files of Medusa heads, in one format per folder: safetensors before pickles."""
    return _one_format(names, HEADS)


@dataclass(frozen=True)
class Backbone:
    """The file names of a backbone.

    weights: in one format, with their index; empty if there are none. index: None for a single
    file. config: it may not exist. beside: tokenizer and settings.
    """

    weights: tuple[str, ...]
    index: str | None
    config: str
    beside: tuple[str, ...]


def backbone(names: Iterable[str], index: Mapping[str, Any] | None = None) -> Backbone:
    """The backbone at the root of a repo, else in the only folder with weights.

    index: the content of Backbone.index, which lists the shards, once it is known.
    """
    folders: dict[str, set[str]] = {"": set()}
    for name in names:
        folder, slash, rest = name.rpartition("/")
        folders.setdefault(folder + slash, set()).add(rest)
    filled = [folder for folder, inside in folders.items() if _weights(inside)]
    chosen = filled[0] if len(filled) == 1 else ""
    weights = tuple(chosen + name for name in _weights(folders[chosen], index))
    beside = sorted(chosen + name for name in folders[chosen] if BESIDE.fullmatch(name))
    last = weights[-1] if weights else ""
    index_name = last if last.endswith(".index.json") else None
    return Backbone(weights, index_name, f"{chosen}config.json", tuple(beside))


def files_of_heads(names: Iterable[str]) -> tuple[str, ...]:
    """All files of heads: weights, config, LoRA adapter, calibration."""
    heads = heads_files(names)
    folders = {PurePosixPath(name).parent for name in heads} | {PurePosixPath()}
    paths = [PurePosixPath(name) for name in sorted(set(names))]
    beside = [str(path) for path in paths if OF_HEADS.fullmatch(path.name)]
    beside = [name for name in beside if PurePosixPath(name).parent in folders]
    return (*heads, *_one_format(names, ADAPTER), *beside)


def says_medusa(config: object) -> bool:
    """Whether a config.json mentions Medusa heads, in any known way."""
    if not isinstance(config, Mapping):
        return False
    names = {"medusa_num_heads", "medusa_num_layers", "medusa_config"}
    inner = isinstance(config.get("medusa"), Mapping)
    return bool(names & set(config)) or inner or config.get("model_type") == "medusa"


def index_has_heads(index: object) -> bool:
    """Whether an index lists tensors of Medusa heads."""
    return any(str(n).startswith(("medusa_head.", "medusa_heads.")) for n in _weight_map(index))


def shards_of(index: object) -> frozenset[str]:
    """The files that an index lists; empty if it is not an index."""
    return frozenset(map(str, _weight_map(index).values()))


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object, or {} if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _weight_map(index: object) -> Mapping[str, Any]:
    table = index.get("weight_map") if isinstance(index, Mapping) else None
    return table if isinstance(table, Mapping) else {}


def _weights(names: set[str], index: object = None) -> tuple[str, ...]:
    """The weights of a folder: those of an index if its files exist, before a single file."""
    for single, shard in WEIGHTS.items():
        shards = sorted(name for name in names if shard.fullmatch(name))
        listed, index_name = sorted(shards_of(index)) or shards, f"{single}.index.json"
        has_index = index_name in names
        if single in names and not (has_index and shards and set(listed) <= names):
            return (single,)
        if has_index:
            return (*listed, index_name)
        if shards:
            return tuple(shards)
    return (HYDRA,) if HYDRA in names else ()


def _one_format(names: Iterable[str], pattern: re.Pattern[str]) -> tuple[str, ...]:
    """The matching files of each folder: all safetensors files, else the first other file."""
    folders: dict[str, list[str]] = {}
    for name in sorted(names):
        if pattern.fullmatch(PurePosixPath(name).name):
            folders.setdefault(name.rpartition("/")[0], []).append(name)
    chosen: list[str] = []
    for group in folders.values():
        chosen += [name for name in group if name.endswith(".safetensors")] or group[:1]
    return tuple(sorted(chosen))
