"""The settings of a GGUF file, its config and its tokenizer, as a small folder in our cache.

transformers reads them there; no weight is among them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.gguf_tokenizer import write_tokenizer
from medusa_chat.checkpoints.kept_copies import SETTINGS, Origin
from medusa_chat.checkpoints.layouts.gguf_config import end_tokens
from medusa_chat.checkpoints.layouts.gguf_header import GgufHeader, read_gguf
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.sampling_defaults import gguf_sampling
from medusa_chat.errors import ModelError

FORMAT = 2
MOST = 64 << 20  # bytes of such a folder, at most
SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def with_settings(found: Checkpoint) -> Checkpoint:
    """The checkpoint with the folder of its settings, which for a GGUF file is made where it is not
    there yet. Raises ModelError."""
    if not found.weights.stored:
        return found
    parts = [found.backbone / name for name in found.weights.files]
    folder = kept_copies.place(SETTINGS, [FORMAT, *_versions()], parts)
    if not kept_copies.is_kept(folder):
        _keep(found, folder)
    return replace(found, written=folder)


def _versions() -> list[str]:
    """Versions of the packages that read the file. Raises ModelError where one is missing."""
    try:
        return [metadata.version(name) for name in ("gguf", "transformers")]
    except metadata.PackageNotFoundError as error:
        raise ModelError("GGUF files need the package gguf: pip install gguf") from error


def _keep(found: Checkpoint, folder: Path) -> None:
    origin = Origin(found.repo or str(found.source.absolute()), str(found.source.resolve()), "")
    try:
        if not kept_copies.has_room(folder, MOST):
            raise ModelError(
                f"the tokenizer of {found.source} takes some MB in {folder.parent}, and its disk "
                "is full: free some (medusa-chat models rm), or set --data-dir"
            )
        kept_copies.drop_strays(SETTINGS)
        with kept_copies.writing(folder, origin) as partial:
            write_settings(found, partial)
    except OSError as error:
        raise ModelError(
            f"the tokenizer of {found.source} cannot be written to {folder.parent} "
            f"({error.strerror or error}): set --data-dir"
        ) from error


def write_settings(found: Checkpoint, folder: Path) -> None:
    """Write the config and the tokenizer of a GGUF file into a folder. Raises ModelError."""
    file, config = found.source, found.weights.config
    header = read_gguf(LocalFolder(file.parent, only=file.name), file.name)
    _write_config(folder, header, config)
    write_tokenizer(folder, file)


def _write_config(folder: Path, header: GgufHeader, config: Mapping[str, Any]) -> None:
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id")}
    generation["eos_token_id"] = end_tokens(header)
    generation |= gguf_sampling(header.metadata)
    if SUPPRESSED in header.metadata:  # of Gemma 4's 12B; a note at the load names it
        generation["suppress_tokens"] = header.metadata[SUPPRESSED]
    whole = {**config, "dtype": "bfloat16"}
    paths.write_text(folder / "config.json", json.dumps(whole, indent=2))
    paths.write_text(folder / "generation_config.json", json.dumps(generation))
