"""Reads the Medusa heads of a checkpoint, and refuses what does not fit its backbone."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.head_tensors import fit_vocabulary, heads_of
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import ModelError, first_line


def read_heads(found: Checkpoint, config: Any) -> tuple[MedusaHeads | None, list[str]]:
    """The heads on the CPU, fit for the backbone of this config, and what had to be cut. A
    wrong hidden size is refused before anything is read. Raises ModelError."""
    if found.heads is None:
        return None, []
    text = config.get_text_config()
    hidden, vocabulary = int(text.hidden_size), int(text.vocab_size)
    where = " and ".join(str(found.folder / file) for file in found.heads.files)
    if found.heads.hidden != hidden:
        raise ModelError(
            f"{where} is for hidden size {found.heads.hidden} and the backbone has {hidden}: give "
            "the backbone that the heads were trained on"
        )
    heads = heads_of(_read_tensors(found, where))
    if not all(torch.isfinite(t).all() for t in heads.parameters()):
        raise ModelError(f"{where} holds NaN or infinity: the heads are broken, fetch them again")
    try:
        cut = fit_vocabulary(heads, vocabulary)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    padded = f"{cut} padded rows of the heads' LM heads are cut: the backbone has {vocabulary}"
    return heads, [padded] if cut else []


def _read_tensors(found: Checkpoint, where: str) -> dict[str, torch.Tensor]:
    """The heads' tensors under their canonical names."""
    assert found.heads is not None
    tensors = {}
    try:
        for file in found.heads.files:
            with safe_open(_safe_file(found, file), framework="pt") as opened:
                for name, (place, inside) in found.heads.tensors.items():
                    if place == file:
                        tensors[name] = opened.get_tensor(inside)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{where} cannot be read: {first_line(error)}") from error
    return tensors


def _safe_file(found: Checkpoint, file: str) -> Path:
    """A file of heads as safetensors: itself, or what the pickle sandbox made of it."""
    path = found.folder / file
    if path.suffix == ".safetensors":
        return path
    if found.heads is not None and found.heads.is_whole:
        files = [found.backbone / name for name in found.weights.files]
        names = dict(zip(files, pickle_sandbox.target_names(files), strict=True))
        return pickle_sandbox.convert(files, finite=False) / names[found.backbone / path.name]
    return pickle_sandbox.convert([path], finite=True) / pickle_sandbox.target_names([path])[0]
