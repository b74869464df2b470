"""Medusa heads as named tensors: read from a checkpoint and checked against its backbone."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import ModelError, first_line

LAYER = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
ROOT = re.compile(r"^(\d+)\.root\.weight$")
LM_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")
ONE_LM_HEAD = "lm_head.weight"
TOKEN_MAP = "token_map"
PADDING = 1024  # most rows beyond the vocabulary that count as padding, not as another vocabulary


def read_heads(checkpoint: Checkpoint, config: Any) -> tuple[MedusaHeads | None, list[str]]:
    """The heads on the CPU, cut to the vocabulary of the backbone with this config, and a note on
    what was cut. A wrong hidden size is refused before anything is read. Raises ModelError."""
    if checkpoint.heads is None:
        return None, []
    text = config.get_text_config()
    hidden, vocabulary = int(text.hidden_size), int(text.vocab_size)
    where = " and ".join(str(checkpoint.folder / file) for file in checkpoint.heads.files)
    if checkpoint.heads.hidden != hidden:
        raise ModelError(
            f"{where} is for hidden size {checkpoint.heads.hidden} and the backbone has {hidden}: "
            "give the backbone that the heads were trained on"
        )
    heads = heads_of(_read_tensors(checkpoint, where))
    if not all(torch.isfinite(t).all() for t in heads.parameters()):
        raise ModelError(
            f"{where} holds NaN or infinity: the heads are broken, download them again"
        )
    try:
        cut = fit_vocabulary(heads, vocabulary)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    padded = f"{cut} padding rows of the heads' LM heads were cut: the vocabulary has {vocabulary}"
    return heads, [padded] if cut else []


def _read_tensors(checkpoint: Checkpoint, where: str) -> dict[str, torch.Tensor]:
    """The heads' tensors under their canonical names."""
    assert checkpoint.heads is not None
    tensors = {}
    try:
        for file in checkpoint.heads.files:
            with safe_open(_safe_file(checkpoint, file), framework="pt") as opened:
                for name, (place, inside) in checkpoint.heads.tensors.items():
                    if place == file:
                        tensors[name] = opened.get_tensor(inside)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{where} cannot be read: {first_line(error)}") from error
    return tensors


def _safe_file(checkpoint: Checkpoint, file: str) -> Path:
    """A file of heads as safetensors: itself, or its copy from the pickle sandbox."""
    path = checkpoint.folder / file
    if path.suffix == ".safetensors":
        return path
    if checkpoint.heads is not None and checkpoint.heads.is_whole:
        files = [checkpoint.backbone / name for name in checkpoint.weights.files]
        names = dict(zip(files, pickle_sandbox.target_names(files), strict=True))
        return pickle_sandbox.convert(files) / names[checkpoint.backbone / path.name]
    return pickle_sandbox.convert([path]) / pickle_sandbox.target_names([path])[0]


def tensors_of(heads: MedusaHeads) -> dict[str, Tensor]:
    """Tensors `{head}.{layer}.linear.weight` [d, d] and `.bias` [d], `{head}.{L}.weight` [R, d];
    `{head}.root.weight` [d, d] for heads that read the root, and `token_map` int64 [R] where there
    is one. Copies, in the heads' dtype."""
    layers = heads.weight.shape[0]
    tensors = {} if heads.token_map is None else {TOKEN_MAP: heads.token_map}
    for head in range(len(heads)):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = heads.weight[layer, head]
            tensors[f"{head}.{layer}.linear.bias"] = heads.bias[layer, head]
        if heads.root_weight is not None:
            tensors[f"{head}.root.weight"] = heads.root_weight[head]
        if heads.lm_weight is not None:
            tensors[f"{head}.{layers}.weight"] = heads.lm_weight.expand(len(heads), -1, -1)[head]
    return {name: t.detach().clone().contiguous() for name, t in tensors.items()}


def heads_of(tensors: Mapping[str, Tensor]) -> MedusaHeads:
    """Heads from tensors under the names of `tensors_of`, optionally with `lm_head.weight` [R, d]
    (one LM head for all) and `token_map` int64 [R], in the dtype of the first tensor; a missing
    bias is zero. Raises ModelError."""
    num_heads, num_layers, has_own, has_root = _count(tensors)
    lm = tensors.get(f"0.{num_layers}.weight", tensors.get(ONE_LM_HEAD))
    first = tensors.get("0.0.linear.weight", tensors.get("0.root.weight", lm))
    assert first is not None  # _count found a layer or an LM head
    rows = None if lm is None else lm.shape[0]
    shape = num_heads, first.shape[-1], num_layers, rows, not has_own
    heads = MedusaHeads(*shape, first.dtype, has_root)
    _fill(heads, tensors)
    return heads.requires_grad_(False)


@torch.no_grad()
def _fill(heads: MedusaHeads, tensors: Mapping[str, Tensor]) -> None:
    layers = heads.weight.shape[0]
    for name in tensors:
        if match := LAYER.match(name):
            part = heads.weight if match[3] == "weight" else heads.bias
            _copy(part[int(match[2]), int(match[1])], tensors, name)
    if heads.root_weight is not None:
        for head, target in enumerate(heads.root_weight):
            _copy(target, tensors, f"{head}.root.weight")
    if heads.lm_weight is not None:
        for head, target in enumerate(heads.lm_weight):
            name = f"{head}.{layers}.weight"
            _copy(target, tensors, name if name in tensors else ONE_LM_HEAD)
    if TOKEN_MAP in tensors:
        heads.token_map = tensors[TOKEN_MAP].long()


def _count(tensors: Mapping[str, Tensor]) -> tuple[int, int, bool, bool]:
    """(heads, layers, whether each head has its own LM head, whether the heads read the root)."""
    layers = {(int(m[1]), int(m[2])) for m in map(LAYER.match, tensors) if m}
    own = {(int(m[1]), int(m[2])) for m in map(LM_HEAD.match, tensors) if m}
    roots = {int(m[1]) for m in map(ROOT.match, tensors) if m}
    unknown = [name for name in tensors if not _is_known(name)]
    if unknown or not layers | own:
        raise ModelError(
            f"these are not Medusa heads: unexpected tensor {(unknown or ['(none)'])[0]!r}"
        )
    num_heads = max(head for head, _ in layers | own) + 1
    num_layers = max((layer + 1 for _, layer in layers), default=0)
    complete = {(head, num_layers) for head in range(num_heads)}
    if len(layers) != num_heads * num_layers or (own and own != complete):
        raise ModelError(
            f"the Medusa heads are incomplete: {num_heads} heads of {num_layers} layers have "
            f"{len(layers)} layers and {len(own)} LM heads in all; download them again"
        )
    if roots and roots != set(range(num_heads)):
        raise ModelError(
            f"the Medusa heads are incomplete: {len(roots)} of {num_heads} read the root; download "
            "them again"
        )
    return num_heads, num_layers, bool(own), bool(roots)


def _is_known(name: str) -> bool:
    patterns = (LAYER, LM_HEAD, ROOT)
    return name in (ONE_LM_HEAD, TOKEN_MAP) or any(one.match(name) for one in patterns)


def _copy(target: Tensor, tensors: Mapping[str, Tensor], name: str) -> None:
    if tensors[name].shape != target.shape:
        raise ModelError(
            f"tensor {name} of the Medusa heads has shape {tuple(tensors[name].shape)}, not "
            f"{tuple(target.shape)}: download them again"
        )
    target.copy_(tensors[name])


def fit_vocabulary(heads: MedusaHeads, vocabulary: int) -> int:
    """Cut the padding rows of the heads' LM heads, so that they end where the backbone's vocabulary
    ends -> how many. Raises ModelError when rows are missing, when there are too many to be
    padding, and for a token map that names tokens outside the vocabulary."""
    if heads.lm_weight is None:
        return 0
    heads.vocabulary = vocabulary
    rows, names = heads.lm_weight.shape[1], heads.token_map
    if names is not None:
        if (
            len(names.unique()) < len(names)
            or int(names.min()) < 0
            or int(names.max()) >= vocabulary
        ):
            raise ModelError(
                "the heads' token map does not fit the backbone's vocabulary of "
                f"{vocabulary} tokens: use the backbone that the heads were trained on"
            )
        return 0
    if not vocabulary <= rows < vocabulary + PADDING:
        raise ModelError(
            f"the heads are for {rows} tokens and the backbone has {vocabulary}: use the "
            "backbone that the heads were trained on"
        )
    if rows > vocabulary:
        kept = heads.lm_weight[:, :vocabulary].clone()
        heads.lm_weight = nn.Parameter(kept, requires_grad=False)
    return rows - vocabulary
