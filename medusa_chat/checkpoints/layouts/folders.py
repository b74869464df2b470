"""Folder: a folder of a checkpoint; tells which of its weight files are heads or a whole model."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from medusa_chat.checkpoints.layouts.drafters import UNNAMED_DRAFTER, drafter_in, is_drafter
from medusa_chat.checkpoints.layouts.headers import REMEDY, Entry, read_header
from medusa_chat.checkpoints.layouts.heads_file import (
    HeadsFile,
    are_heads,
    part_of,
    prefix_of,
    read_heads,
)
from medusa_chat.checkpoints.layouts.settings_files import refuse_odd_settings
from medusa_chat.checkpoints.layouts.source import LocalFolder, Source, read_json
from medusa_chat.checkpoints.layouts.text_part import text_part
from medusa_chat.errors import ModelError

WEIGHTS = (".safetensors", ".pt", ".bin")
# files that trainers write beside a model, and that decoding does not need
JUNK = re.compile(
    r"^(optimizer|scheduler|rng_state|scaler|training_args|trainer|consolidated|random_states)"
    r"|heads_accuracy"
)
NAMED = re.compile(r"medusa", re.IGNORECASE)
MODEL = re.compile(r"^(model|pytorch_model)([-.].*)?\.(safetensors|bin)$")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class BackboneFiles:
    """A whole model. folder: "" or the subfolder. files: its weights in that folder, all
    .safetensors, all pickles, or the parts of one GGUF file; missing: files of its index that are
    not there. stored: what the types of a GGUF file are called, which holds config and tokenizer,
    too; packed: bytes of its matrices in blocks in memory, table: of these the embeddings';
    stacked: bytes of its experts in blocks where our C keeps them, and their weights; wide: weights
    of all else. notes: why these files."""

    folder: str
    config: Mapping[str, Any]
    files: tuple[str, ...]
    missing: tuple[str, ...]
    bytes: int
    has_tokenizer: bool
    stored: str = ""
    packed: int = 0
    table: int = 0
    stacked: tuple[int, int] = (0, 0)
    wide: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_pickled(self) -> bool:
        return bool(self.files) and not self.stored and not self.files[0].endswith(".safetensors")


@dataclass
class Folder:
    """One folder of a source while its contents are read. sizes: file -> bytes."""

    source: Source
    folder: str
    sizes: Mapping[str, int]
    notes: list[str] = field(default_factory=list)
    _json: dict[str, dict[str, Any]] = field(default_factory=dict)
    _headers: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def path(self, file: str) -> str:
        return f"{self.folder}/{file}" if self.folder else file

    def json(self, file: str) -> dict[str, Any]:
        """A JSON object of this folder, read once; {} for a missing file."""
        if file not in self.sizes:
            return {}
        if file not in self._json:
            self._json[file] = read_json(self.source, self.path(file))
        return self._json[file]

    def add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def header(self, file: str) -> dict[str, Entry]:
        """The tensors of a file, read once."""
        if file not in self._headers:
            self._headers[file] = read_header(self.source, self.path(file))
        return self._headers[file]


def backbone_in(folder: Folder, heads: HeadsFile | None) -> BackboneFiles | None:
    """The whole model in a folder: a config with a model_type, and weights other than heads."""
    config = folder.json("config.json")
    if not isinstance(config.get("model_type"), str) or config["model_type"] == "medusa":
        return None
    only_heads = set() if heads is None or heads.is_whole else set(heads.files)
    files, missing, table = _model_files(folder)
    files = [file for file in files if folder.path(file) not in only_heads]
    if not files and not missing:
        return None
    if files and not table and files[0].endswith(WEIGHTS[0]) and files != ["model.safetensors"]:
        raise ModelError(_unnamed(folder, files[0]))
    refuse_odd_settings(folder.source, folder.folder, list(folder.sizes), config)
    text = text_part(config)
    notes = (f"only the text part of {config['model_type']} is loaded, for text chats",)
    if isinstance(folder.source, LocalFolder) and not missing:
        _refuse_weights(folder, files, text)
    return BackboneFiles(
        folder=folder.folder,
        config=text,
        files=tuple(files),
        missing=tuple(missing),
        bytes=sum(folder.sizes[file] for file in files),
        has_tokenizer=any(name in folder.sizes for name in TOKENIZERS),
        notes=() if text is config else notes,
    )


def _unnamed(folder: Folder, file: str) -> str:
    """The error for weights with neither an index nor a usual name."""
    where, index = f"{folder.source.name}/{folder.path(file)}", "model.safetensors.index.json"
    if "-of-" in file:
        return f"{where} is one of several files and {index} is missing: download it too"
    return f"{where} is not the name of a model's weights: rename it to model.safetensors"


def _refuse_weights(folder: Folder, files: list[str], config: Mapping[str, Any]) -> None:
    """Refuse weights whose headers do not fit the config. Those of a Hub repo are not read: a
    download is checked by its size and hash."""
    header: dict[str, Entry] = {}
    for file in files:
        header |= folder.header(file)
    if is_drafter(header):
        drafter = drafter_in(folder.source)
        raise ModelError(f"{folder.source.name} {drafter.use if drafter else UNNAMED_DRAFTER}")
    refuse_misfits(header, config, f"{folder.source.name}/{folder.path(files[0])}")


def model_files(source: Source) -> tuple[str, ...]:
    """The weight files in the top folder of a source, in the order of `backbone_in`."""
    sizes = {name: size for name, size in source.files().items() if "/" not in name}
    return tuple(_model_files(Folder(source, "", sizes))[0])


def _model_files(folder: Folder) -> tuple[list[str], list[str], dict[str, str]]:
    """(the model's weight files, the missing ones, its index: tensor -> file, if any). Safetensors
    are preferred to pickles, and an index with all its files to a single file, which is then
    something else. Other indexes belong to other programs (Mistral's "consolidated")."""
    for ending, stem in ((".safetensors", "model"), (".bin", "pytorch_model")):
        single, index = stem + ending, f"{stem}{ending}.index.json"
        table = _weight_map(folder, index) if index in folder.sizes else {}
        files = sorted(set(table.values()))
        there = [file for file in files if folder.sizes.get(file, -1) > 0]
        if there and len(there) == len(files):
            if single in folder.sizes and single not in files:
                folder.add_note(
                    f"{folder.path(single)} is not read: {index} names the model's files"
                )
            return files, [], table
        if single in folder.sizes:
            return [single], [], {}
        if table:
            return there, [file for file in files if file not in there], table
        files = sorted(n for n in folder.sizes if MODEL.match(n) and n.endswith(ending))
        if files:
            return files, [], {}
    return [], [], {}


def _weight_map(folder: Folder, index: str) -> dict[str, str]:
    table = folder.json(index).get("weight_map")
    if not isinstance(table, dict) or not all(
        isinstance(file, str) and file.endswith(WEIGHTS) and "/" not in file and "\\" not in file
        for file in table.values()
    ):
        raise ModelError(
            f"{folder.source.name}/{folder.path(index)} has no valid weight_map: download it again"
        )
    return table


def heads_in(folder: Folder, has_model: bool = False) -> HeadsFile | None:
    """The heads in one folder: in a file named after them, in the model's weights, or in any other
    file. has_model: whether an earlier folder has the model."""
    weights = [n for n in sorted(folder.sizes) if n.endswith(WEIGHTS) and not JUNK.search(n)]
    weights = [name for name in weights if name not in ADAPTERS]
    model, missing, table = _model_files(folder)
    named = [n for n in weights if NAMED.search(n) and n not in model and n not in missing]
    if named:
        return _own_file(folder, named)
    if any(file in missing and _is_head(name) for name, file in table.items()):
        return None  # the model is incomplete, which its backbone reports
    if model and (model_heads := _in_model(folder, model, table)):
        return model_heads
    rest = [n for n in weights if n not in model and not MODEL.match(n)]
    return _other_file(folder, rest, has_model or bool(model))


def _own_file(folder: Folder, named: list[str]) -> HeadsFile:
    """The file of heads; a .safetensors is preferred to a .pt."""
    ordered = sorted(named, key=lambda n: (not n.endswith(".safetensors"), n))
    for file in ordered[1:]:
        folder.notes.append(f"{folder.path(file)} is not read: {ordered[0]} is")
    path = folder.path(ordered[0])
    header = folder.header(ordered[0])
    return read_heads({path: header}, f"{folder.source.name}/{path}", whole=False)


def _in_model(folder: Folder, files: list[str], table: Mapping[str, str]) -> HeadsFile | None:
    """The heads among the weights of a model; None if there are none. With an index, only the
    headers of files with heads are read."""
    if table:
        files = sorted({f for name, f in table.items() if _is_head(name) and f in files})
    headers = {folder.path(file): folder.header(file) for file in files}
    names = [name for header in headers.values() for name in header]
    where = f"{folder.source.name}/{folder.path(files[0])}" if files else ""
    if are_heads(names) and (not table or are_heads(table)):
        return read_heads(headers, where, whole=False)
    heads = {
        file: {name: entry for name, entry in header.items() if prefix_of(name)}
        for file, header in headers.items()
    }
    heads = {file: header for file, header in heads.items() if header}
    return read_heads(heads, where, whole=True) if heads else None


def _is_head(name: str) -> bool:
    part = part_of(name)
    return bool(prefix_of(name)) or (part is not None and part.head >= 0)


def _other_file(folder: Folder, files: Iterable[str], has_model: bool) -> HeadsFile | None:
    """Heads in a file of any other name. An unreadable file is ignored with a note if there is a
    model, otherwise refused."""
    for file in files:
        try:
            header = folder.header(file)
            if are_heads(header) or not has_model:
                where = f"{folder.source.name}/{folder.path(file)}"
                return read_heads({folder.path(file): header}, where, whole=False)
        except ModelError as error:
            if not has_model:
                raise
            folder.notes.append(f"ignored: {error}")
    return None


LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d{1,5})\.")
QUANTISED = "quantization_config"
EMBEDDINGS = "embed_tokens.weight"
KNOWN = ("llama", "mistral", "qwen2")  # families whose tensors follow from the config
NUMBERS = (
    *("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads"),
    "num_hidden_layers",
)
MOST_LAYERS = 10_000


def refuse_misfits(header: Mapping[str, Entry], config: Mapping[str, Any], where: str) -> None:
    """header: of all files of the model. Raises ModelError for a missing layer and, in known
    families, for any tensor that is missing or has another shape. Of a quantised model only the
    layers are counted: its weights have other shapes."""
    _refuse_missing_layers(header, config.get("num_hidden_layers"), where)
    if not are_known(config) or config.get(QUANTISED):
        return
    starts = [name.removesuffix(EMBEDDINGS) for name in header if name.endswith(EMBEDDINGS)]
    if len(starts) != 1:
        return  # several models in one, or none, whose layers were counted
    for name, shape in _expected(config):
        outer = name == "lm_head.weight"
        entry = _outer(header, name) if outer else header.get(starts[0] + name)
        if entry is None:
            whole = name if outer else starts[0] + name
            raise ModelError(f"the weights in {where} lack {whole}: it is incomplete, {REMEDY}")
        if entry.shape != shape:
            raise ModelError(
                f"{where}: tensor {name} is {entry.shape}, config.json says {shape}: {REMEDY}"
            )


def are_known(config: Mapping[str, Any]) -> bool:
    """Whether the shapes of all tensors follow from a config."""
    has_numbers = all(type(config.get(key)) is int for key in NUMBERS)
    return config.get("model_type") in KNOWN and has_numbers


def _outer(header: Mapping[str, Entry], name: str) -> Entry | None:
    """A tensor outside the layers, whatever the prefix of its name."""
    return next((e for n, e in header.items() if n == name or n.endswith(f"model.{name}")), None)


def _refuse_missing_layers(header: Mapping[str, Entry], count: object, where: str) -> None:
    present = {int(match[1]) for name in header if (match := LAYER.search(name))}
    if type(count) is not int or not present or count > MOST_LAYERS:
        return
    if missing := set(range(count)) - present:
        raise ModelError(
            f"{where} lacks layer {min(missing)} of {count}: it is incomplete, {REMEDY}"
        )


def _expected(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors of a known family."""
    hidden, rows, inner = (config[k] for k in ("hidden_size", "vocab_size", "intermediate_size"))
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    few = (config.get("num_key_value_heads") or heads) * width
    yield EMBEDDINGS, (rows, hidden)
    yield "norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (rows, hidden)
    for layer in range(config["num_hidden_layers"]):
        inside = {
            "self_attn.q_proj": (heads * width, hidden),
            "self_attn.k_proj": (few, hidden),
            "self_attn.v_proj": (few, hidden),
            "self_attn.o_proj": (hidden, heads * width),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for name, shape in inside.items():
            yield f"layers.{layer}.{name}.weight", shape
