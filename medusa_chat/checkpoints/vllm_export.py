"""Export for vLLM: a folder with the heads in vLLM's format, and the command that serves them.

vLLM 0.32 drafts a chain: the top token of each head. Its heads are residual layers, each a square
linear and SiLU, followed either by one LM head shared by all heads, which may cover part of the
vocabulary (listed in a token map), or by an LM head each, over the whole vocabulary
(vLLM's `model_executor/models/medusa.py`).
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_chat import paths
from medusa_chat.checkpoints.fetch import fetch
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.head_weights import (
    LAYER,
    LM_HEAD,
    ONE_LM_HEAD,
    ROOT,
    TOKEN_MAP,
    read_heads,
    tensors_of,
)
from medusa_chat.checkpoints.kept_copies import ABOUT
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.checkpoints.weights import config_of, read_lm_head, read_model, weight_files
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, ModelError, UsageError, first_line
from medusa_chat.messages import LoadPhase, LoadRequest
from medusa_chat.trees.calibration import CALIBRATION_FILE, Calibration
from medusa_chat.units import gb

BACKBONE = "backbone"  # the subfolder for the backbone, where that is written too
SETTINGS = (".json", ".jinja", ".model", ".txt")  # suffixes of the files beside the weights
INDEX = ".index.json"


@dataclass(frozen=True)
class VllmExport:
    """What was written. backbone: the model to serve with vLLM, a Hub id or a folder. tokens: how
    many tokens of the vocabulary can be drafted. notes: what to know about it, a sentence each."""

    folder: Path
    bytes: int
    backbone: str
    heads: int
    tokens: int
    vocabulary: int
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Options for vLLM. It creates as many heads as tokens to draft: more heads in the file are
        ignored, and missing ones would be random. Its check that every weight was loaded fails on a
        token map, so it is switched off there."""
        drafts = {
            "method": "medusa",
            "model": str(self.folder),
            "num_speculative_tokens": self.heads,
        }
        options: dict[str, Any] = {"speculative_config": drafts}
        if self.tokens < self.vocabulary:
            options["model_loader_extra_config"] = {"enable_weights_track": False}
        return options

    @property
    def command(self) -> list[str]:
        """The command that serves it, word by word."""
        words = ["vllm", "serve", self.backbone]
        for name, value in self.options.items():
            words += [f"--{name.replace('_', '-')}", json.dumps(value)]
        return words


@dataclass(frozen=True)
class VllmHeads:
    """tensors and config under vLLM's names. tokens: how many can be drafted."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    tokens: int

    @classmethod
    def of(
        cls,
        heads: MedusaHeads,
        lm_head: LogitHead | None,
        shortlist: Sequence[int],
        vocabulary: int,
    ) -> "VllmHeads":
        """Convert heads on the CPU, with weights [layers, K, d, d], for a backbone with this
        vocabulary size. The heads are changed and must not be used afterwards. lm_head: the
        backbone's, for heads that share it. shortlist: the tokens to draft, empty for all; it is
        ignored where each head has an LM head of its own. Raises ModelError that names the tensor
        which vLLM has no place for."""
        tensors = vllm_names(tensors_of(heads))
        own = [name for name in tensors if name.startswith("lm_heads.")]
        is_one = heads.lm_weight is None or len(heads.lm_weight) == 1
        tokens = vocabulary
        if is_one:
            weight, names = _one_lm_head(heads, lm_head, shortlist, vocabulary)
            tensors = {name: t for name, t in tensors.items() if name not in own}
            tensors[ONE_LM_HEAD] = weight.contiguous()
            if names is not None:
                tensors[TOKEN_MAP], tokens = names, len(names)
        elif heads.token_map is not None:
            raise ModelError(
                "heads with a token map and an LM head each cannot be exported: vLLM supports a "
                "token map only for one LM head shared by all heads"
            )
        return cls(tensors, _config(heads, vocabulary, tokens, is_one), tokens)


def export_vllm(
    request: LoadRequest, output: Path
) -> Iterator[tuple[LoadPhase, VllmExport | None]]:
    """Write the heads of a checkpoint in vLLM's format, phase by phase (messages.LoadPhase); the
    last phase is "ready", with what was written. The backbone of a GGUF file is written beside
    them, in bf16, as vLLM reads it; its size is told first.

    Raises UsageError where `output` exists, ModelError for heads that vLLM cannot express, and
    MedusaChatError where they cannot be written; no partial folder is left behind."""
    output = output.expanduser().absolute()
    if output.exists():
        raise _exists(output)
    yield LoadPhase("resolve"), None
    checkpoint = yield from fetch(request)
    _refuse(checkpoint)
    checkpoint = with_settings(checkpoint)
    yield LoadPhase("read", note=_unpacking(checkpoint)), None
    heads, notes = _read(checkpoint)
    size = _write(output, checkpoint, heads)
    yield LoadPhase("ready"), _described(output, size, checkpoint, heads, notes)


def _unpacking(checkpoint: Checkpoint) -> str:
    """What is written of a GGUF file; empty for none."""
    if not checkpoint.weights.stored:
        return ""
    size = gb(2 * sizes(checkpoint.weights.config).parameters)
    return (
        f"{checkpoint.source.name} is unpacked to bf16, for vLLM: {size} in memory and on the disk"
    )


def _refuse(checkpoint: Checkpoint) -> None:
    if checkpoint.heads is None:
        raise ModelError(
            f"{checkpoint.name} has no Medusa heads to export: give a --checkpoint with heads, or "
            "train some (medusa-chat train)"
        )
    if checkpoint.adapter is not None:
        raise ModelError(
            f"{checkpoint.name} cannot be exported: its heads belong to the backbone with the LoRA "
            f"adapter {checkpoint.adapter.name}, which vLLM's Medusa method does not apply; merge "
            "the adapter into the backbone, and give the heads with the merged --backbone"
        )


def _read(checkpoint: Checkpoint) -> tuple[VllmHeads, list[str]]:
    """The heads in vLLM's terms, and notes."""
    config = config_of(checkpoint)
    heads, notes = read_heads(checkpoint, config)
    assert heads is not None
    vocabulary = int(config.get_text_config().vocab_size)
    lm_head = read_lm_head(checkpoint, config) if heads.is_shared else None
    tokens: tuple[int, ...] = ()
    if checkpoint.calibration is not None:
        tokens, said = Calibration.read(checkpoint.calibration).usable_shortlist(vocabulary)
        notes += said
    made = VllmHeads.of(heads, lm_head, tokens, vocabulary)
    if tokens and made.tokens == vocabulary:
        notes.append("all tokens can be drafted: vLLM has no shortlist for heads with own LM heads")
    return made, notes


def _write(output: Path, checkpoint: Checkpoint, heads: VllmHeads) -> int:
    """Write the whole folder or nothing -> its bytes."""

    def fill(folder: Path) -> None:
        own = writes_backbone(checkpoint)
        base = BACKBONE if own else checkpoint.repo or str(checkpoint.source.resolve())
        config = {**heads.config, "base_model_name_or_path": base}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        save_file(dict(heads.tensors), folder / "model.safetensors")
        if checkpoint.calibration is not None:
            shutil.copyfile(checkpoint.calibration, folder / CALIBRATION_FILE)
        if own:
            write_plain_backbone(folder / BACKBONE, checkpoint)

    try:
        return paths.write_folder(output, fill)
    except FileExistsError:
        raise _exists(output) from None
    except (OSError, SafetensorError) as error:
        raise MedusaChatError(
            f"{output} cannot be written ({first_line(error)}): free some disk space, or give "
            "another DIR"
        ) from error


def _described(
    output: Path, size: int, checkpoint: Checkpoint, heads: VllmHeads, notes: list[str]
) -> VllmExport:
    served = str(checkpoint.backbone.resolve())
    if writes_backbone(checkpoint):
        served = str(output / BACKBONE)
        why = "the backbone without the heads, which vLLM would read as its own weights"
        if checkpoint.weights.stored:
            why = f"{checkpoint.source.name} unpacked to bf16"
        notes.append(f"{served} is {why}")
    elif checkpoint.repo is not None:
        served = checkpoint.repo
    config = heads.config
    counts = config["num_heads"], heads.tokens, config["vocab_size"]
    return VllmExport(output, size, served, *counts, tuple(notes))


def _exists(output: Path) -> UsageError:
    return UsageError(f"{output} exists: give another DIR, or move it away")


def writes_backbone(checkpoint: Checkpoint) -> bool:
    """Whether the backbone is written beside the heads."""
    return bool(checkpoint.weights.stored) or has_heads_beside(checkpoint)


def has_heads_beside(checkpoint: Checkpoint) -> bool:
    """Whether the heads are in their backbone's folder, or in its weight files."""
    if checkpoint.heads is None:
        return False
    heads_folder = (checkpoint.folder / checkpoint.heads.files[0]).parent
    return heads_folder.resolve() == checkpoint.backbone.resolve()


def write_plain_backbone(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the backbone of a checkpoint into a new folder: the settings files unchanged, and the
    weights as safetensors, file by file, without the tensors of the heads. Raises OSError and
    SafetensorError."""
    folder.mkdir()
    if checkpoint.weights.stored:
        _write_unpacked(folder, checkpoint)
        return
    for file in sorted(checkpoint.backbone.iterdir()):
        is_setting = file.suffix in SETTINGS and not file.name.endswith(INDEX)
        if is_setting and file.is_file() and file.name != CALIBRATION_FILE:
            shutil.copyfile(file, folder / file.name)
    places: dict[str, str] = {}
    for file in weight_files(checkpoint):
        kept = _without_heads(folder / file.name, file, checkpoint)
        places |= dict.fromkeys(kept, file.name)
    if set(places.values()) != {"model.safetensors"}:
        index = {"metadata": {}, "weight_map": places}
        (folder / f"model.safetensors{INDEX}").write_text(json.dumps(index), "utf-8")


def _write_unpacked(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the model of a GGUF file in bf16, with its settings."""
    model = read_model(checkpoint, config_of(checkpoint), "bf16", torch.device("cpu"))
    model.save_pretrained(folder)
    for file in checkpoint.settings.iterdir():
        if file.suffix in SETTINGS and file.name != ABOUT:
            shutil.copyfile(file, folder / file.name)


def _without_heads(target: Path, file: Path, checkpoint: Checkpoint) -> list[str]:
    """Write the tensors of a file except those of the heads -> their names."""
    heads = checkpoint.heads
    assert heads is not None
    names = {name for _, name in heads.tensors.values()} if heads.is_whole else set()
    tensors = {name: t for name, t in load_file(file).items() if name not in names}
    if tensors:
        save_file(tensors, target, {"format": "pt"})
    return list(tensors)


def vllm_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of `tensors_of` -> the same tensors, shapes and dtypes (layers
    [d, d], biases [d], LM heads [R, d]) under vLLM's names, without a token map. Raises ModelError
    for a tensor that vLLM's heads do not have."""
    named = {}
    for name, tensor in tensors.items():
        if match := LAYER.match(name):
            _require_residual(name, tensor)
            named[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        elif match := LM_HEAD.match(name):
            named[f"lm_heads.{match[1]}.weight"] = tensor
        elif ROOT.match(name):
            raise ModelError(
                f"the heads' {name} cannot be exported: vLLM's Medusa heads do not read the root, "
                "the token that is certain when they draft; train heads with --no-root for it"
            )
        elif name != TOKEN_MAP:
            raise ModelError(_no_place(name))
    return named


def _require_residual(name: str, tensor: Tensor) -> None:
    """Require a square layer: its input is added to its output."""
    if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
        raise ModelError(_no_place(f"{name}, {tensor.shape[0]} x {tensor.shape[1]}"))


def _no_place(part: str) -> str:
    return (
        f"the heads' {part} cannot be exported: vLLM's Medusa heads are residual layers of a "
        "square linear and SiLU before an LM head; train heads of that shape for it"
    )


def _one_lm_head(
    heads: MedusaHeads, lm_head: LogitHead | None, shortlist: Sequence[int], vocabulary: int
) -> tuple[Tensor, Tensor | None]:
    """The LM head [R, d] shared by all heads, and the token of each row int64 [R]; None: all tokens
    in order. vLLM accepts a token map only for a part of the vocabulary."""
    if lm_head is not None and getattr(lm_head.linear, "bias", None) is not None:
        raise ModelError(
            "heads that share an LM head with a bias cannot be exported: vLLM's Medusa heads have "
            "none there"
        )
    heads.shorten(shortlist, lm_head)
    names = heads.token_map if heads.shortlist is None else heads.shortlist
    weight: Any = heads.short.weight if heads.short is not None else heads.lm_weight
    if weight is None:
        assert lm_head is not None
        weight = lm_head.linear.weight
    weight = weight[0] if weight.dim() == 3 else weight
    if names is None:
        return weight, None
    if len(names) == vocabulary:
        return weight[names.argsort()], None
    return weight[: len(names)], names.clone()


def _config(heads: MedusaHeads, vocabulary: int, tokens: int, is_one: bool) -> dict[str, Any]:
    layers, count, hidden, _ = heads.weight.shape
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "num_heads": count,
        "num_hidden_layers": layers,
        "medusa_fc_bias": True,
        "original_lm_head": is_one,
        "truncated_vocab_size": tokens,
    }
