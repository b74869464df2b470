"""Export for vLLM: a folder with the heads that it reads, and the command that serves them.

vLLM 0.32 drafts a chain: the first choice of each head. Its heads are residual layers, each a
square linear and SiLU, and either one LM head for all, which may hold some tokens only (named by a
token map), or one for each, over the whole vocabulary (its `model_executor/models/medusa.py`).
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

BACKBONE = "backbone"  # the folder below, where the backbone is written too
SETTINGS = (".json", ".jinja", ".model", ".txt")  # endings of what stands beside the weights
INDEX = ".index.json"


@dataclass(frozen=True)
class VllmExport:
    """What was written. backbone: what vLLM is to serve, a Hub id or a folder. tokens, of
    vocabulary: that a draft is taken from. notes: what to know of it, a sentence each."""

    folder: Path
    bytes: int
    backbone: str
    heads: int
    tokens: int
    vocabulary: int
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Options of vLLM. It makes as many heads as it shall draft tokens: it leaves out what is
        more in the file, and what is not in it would be random. Its check that all weights were in
        the files takes a token map for one that was not, so it is switched off there."""
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
        """The words that serve it."""
        words = ["vllm", "serve", self.backbone]
        for name, value in self.options.items():
            words += [f"--{name.replace('_', '-')}", json.dumps(value)]
        return words


@dataclass(frozen=True)
class VllmHeads:
    """tensors and config as vLLM names them. tokens: how many a draft is taken from."""

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
        """Express heads on the CPU, their weights [layers, K, d, d], for a backbone of so many
        tokens; they are changed and of no other use afterwards. lm_head: the backbone's, for heads
        that share it. shortlist: tokens to draft from, empty for all; one LM head for each head is
        written whole. Raises ModelError, by name, for what vLLM has no place for."""
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
    """Write the heads of a checkpoint as vLLM reads them, phase by phase (messages.LoadPhase); the
    last is "ready" with what was written. The backbone in a GGUF file is written in bf16 beside
    them, for vLLM reads no packed weights so; its size is told first.

    Raises UsageError where `output` exists, ModelError for heads that vLLM cannot express,
    MedusaChatError where they cannot be written; no partial folder stays."""
    output = output.expanduser().absolute()
    if output.exists():
        raise _exists(output)
    yield LoadPhase("resolve"), None
    found = yield from fetch(request)
    _refuse(found)
    found = with_settings(found)
    yield LoadPhase("read", note=_unpacking(found)), None
    heads, notes = _read(found)
    size = _write(output, found, heads)
    yield LoadPhase("ready"), _described(output, size, found, heads, notes)


def _unpacking(found: Checkpoint) -> str:
    """What is written of a GGUF file; empty for none."""
    if not found.weights.stored:
        return ""
    size = gb(2 * sizes(found.weights.config).parameters)
    return f"{found.source.name} is unpacked to bf16, for vLLM: {size} in memory and on the disk"


def _refuse(found: Checkpoint) -> None:
    if found.heads is None:
        raise ModelError(
            f"{found.name} has no Medusa heads to export: give --checkpoint with heads, or train "
            "some (medusa-chat train)"
        )
    if found.adapter is not None:
        raise ModelError(
            f"{found.name} cannot be exported: its heads belong to the backbone with the LoRA "
            f"adapter {found.adapter.name}, which vLLM's Medusa method does not apply; merge the "
            "adapter into the backbone, and give heads and merged backbone (--backbone)"
        )


def _read(found: Checkpoint) -> tuple[VllmHeads, list[str]]:
    """The heads in vLLM's terms, and notes."""
    config = config_of(found)
    heads, notes = read_heads(found, config)
    assert heads is not None
    vocabulary = int(config.get_text_config().vocab_size)
    lm_head = read_lm_head(found, config) if heads.is_shared else None
    tokens: tuple[int, ...] = ()
    if found.calibration is not None:
        tokens, said = Calibration.read(found.calibration).usable_shortlist(vocabulary)
        notes += said
    made = VllmHeads.of(heads, lm_head, tokens, vocabulary)
    if tokens and made.tokens == vocabulary:
        notes.append("drafts are taken from all tokens: vLLM has no shortlist for several LM heads")
    return made, notes


def _write(output: Path, found: Checkpoint, heads: VllmHeads) -> int:
    """Write the folder whole or not at all; its bytes."""

    def fill(folder: Path) -> None:
        own = writes_backbone(found)
        base = BACKBONE if own else found.repo or str(found.source.resolve())
        config = {**heads.config, "base_model_name_or_path": base}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        save_file(dict(heads.tensors), folder / "model.safetensors")
        if found.calibration is not None:
            shutil.copyfile(found.calibration, folder / CALIBRATION_FILE)
        if own:
            write_plain_backbone(folder / BACKBONE, found)

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
    output: Path, size: int, found: Checkpoint, heads: VllmHeads, notes: list[str]
) -> VllmExport:
    served = str(found.backbone.resolve())
    if writes_backbone(found):
        served = str(output / BACKBONE)
        why = "the backbone without its heads: vLLM would take them for its weights"
        if found.weights.stored:
            why = f"{found.source.name} unpacked to bf16"
        notes.append(f"{served} is {why}")
    elif found.repo is not None:
        served = found.repo
    config = heads.config
    counts = config["num_heads"], heads.tokens, config["vocab_size"]
    return VllmExport(output, size, served, *counts, tuple(notes))


def _exists(output: Path) -> UsageError:
    return UsageError(f"{output} exists: give another DIR, or move it away")


def writes_backbone(found: Checkpoint) -> bool:
    """Whether the backbone is written beside the heads."""
    return bool(found.weights.stored) or has_heads_beside(found)


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
    if found.weights.stored:
        _write_unpacked(folder, found)
        return
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


def _write_unpacked(folder: Path, found: Checkpoint) -> None:
    """Write the model of a GGUF file in bf16, with its settings."""
    model = read_model(found, config_of(found), "bf16", torch.device("cpu"))
    model.save_pretrained(folder)
    for file in found.settings.iterdir():
        if file.suffix in SETTINGS and file.name != ABOUT:
            shutil.copyfile(file, folder / file.name)


def _without_heads(target: Path, file: Path, found: Checkpoint) -> list[str]:
    """Write the file's tensors that are none of the heads; their names."""
    assert found.heads is not None
    heads = {name for _, name in found.heads.tensors.values()} if found.heads.is_whole else set()
    tensors = {name: t for name, t in load_file(file).items() if name not in heads}
    if tensors:
        save_file(tensors, target, {"format": "pt"})
    return list(tensors)


def vllm_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of `tensors_of` -> the same tensors, shapes and dtypes (layers
    [d, d], biases [d], LM heads [R, d]), under vLLM's, without a token map. Raises ModelError for
    one that its heads have no part for."""
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
    """Its input is added to its output, so they are of one size."""
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
    """The LM head [R, d] of all heads, and the tokens int64 [R] of its rows; None: all in order.
    vLLM takes a token map for less than all alone."""
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
