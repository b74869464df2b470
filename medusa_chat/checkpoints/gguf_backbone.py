"""A GGUF file as an ordinary folder: converted once, kept in our cache, and read from there."""

import json
from collections.abc import Generator, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.gguf_tokenizer import write_tokenizer
from medusa_chat.checkpoints.gguf_weights import DTYPES, GgufWeights
from medusa_chat.checkpoints.kept_copies import Origin
from medusa_chat.checkpoints.layouts.contents import backbone_of
from medusa_chat.checkpoints.layouts.folders import BackboneFiles
from medusa_chat.checkpoints.layouts.gguf_config import end_tokens
from medusa_chat.checkpoints.layouts.gguf_types import GgufHeader
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint, News
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadPhase
from medusa_chat.units import gb

KIND = "gguf"
FORMAT = 4
BESIDE = 32 << 20  # bytes of the tokenizer and the config, at most
TICK_SECONDS = 0.2
SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def converted(found: Checkpoint, precision: str) -> Generator[News, None, Checkpoint]:
    """The checkpoint with its backbone as a folder: itself where it is none of a GGUF file, else
    what was converted now or before, one "convert" for each piece of news. precision: fp32, bf16
    and fp16 are kept as such, what is quantised then comes from bf16. Closing it leaves nothing
    behind. Raises ModelError."""
    if not found.weights.stored:
        return found
    file = found.source
    stored = precision if precision in DTYPES else "bf16"
    parts = [found.backbone / name for name in found.weights.files]
    folder = kept_copies.place(KIND, [FORMAT, stored, *_versions()], parts)
    weights = _read(folder)
    if weights is None:
        yield from _locked(found, file, stored, folder)
        weights = _read(folder)
    if weights is None:
        raise ModelError(f"{file} was converted, but {folder} cannot be read: try again")
    what = f"{file.name} ({found.weights.stored}) is read as it was converted to {stored}"
    weights, notes = replace(weights, kept=found.weights.kept), (*found.notes, what)
    return replace(found, backbone=folder, weights=weights, original=file, notes=notes)


def _versions() -> list[str]:
    """Versions of the packages that convert. Raises ModelError where one is not installed."""
    try:
        return [metadata.version(name) for name in ("gguf", "transformers")]
    except metadata.PackageNotFoundError as error:
        raise ModelError("GGUF files need the package gguf: pip install gguf") from error


def converted_folder(found: Checkpoint, precision: str) -> Checkpoint:
    """The result of `converted`, without its progress."""
    steps = converted(found, precision)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def write_settings(found: Checkpoint, folder: Path) -> None:
    """Write the config and the tokenizer of a GGUF file into a folder, as they are beside what is
    converted. Raises ModelError, also for tensors that are not those of its family; no weight is
    read."""
    weights = GgufWeights.of(found.source, found.weights.config, "bf16")
    weights.refuse_unlike(found.weights.config)
    _write_settings(folder, weights, found.weights.config, "bf16")


def _read(folder: Path) -> BackboneFiles | None:
    """What was converted; a damaged copy is dropped, to be made anew."""
    if not kept_copies.is_kept(folder):
        return None
    try:
        weights = backbone_of(LocalFolder(folder))
        if weights is not None and weights.has_tokenizer:
            return weights
    except ModelError:
        pass
    kept_copies.drop(folder)
    return None


def _locked(found: Checkpoint, file: Path, stored: str, folder: Path) -> Iterator[News]:
    """Convert while no other process does; where one has done so meanwhile, there is no need."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{folder.name}.lock")
        waits = LoadPhase("convert", note=f"another process converts {file.name}: waiting for it")
        while not lock.is_locked:
            try:
                lock.acquire(timeout=TICK_SECONDS)
            except Timeout:
                yield waits, None
        try:
            if not kept_copies.is_kept(folder):
                yield from _convert(found, file, stored, folder)
        finally:
            lock.release()
    except OSError as error:
        raise ModelError(
            f"{file} cannot be converted in {folder.parent} ({error.strerror or error}): free disk "
            "space there, or set --data-dir"
        ) from error


def _convert(found: Checkpoint, file: Path, stored: str, folder: Path) -> Iterator[News]:
    config = found.weights.config
    weights = GgufWeights.of(file, config, stored)
    weights.refuse_unlike(config)
    size = weights.bytes
    if not kept_copies.has_room(folder, size + BESIDE):
        raise ModelError(
            f"{file} takes {gb(size)} in {folder.parent} once converted, and its disk is full: "
            "free some (medusa-chat models rm), or set --data-dir"
        )
    told = f"{gb(found.weights.bytes)}, {found.weights.stored}"
    note = f"converting {file.name} ({told}) once to {stored}: takes {gb(size)} in {folder.parent}"
    phase = LoadPhase("convert", total=size, note=note)
    yield phase, None
    with kept_copies.writing(folder, _origin(found, file, stored)) as partial:
        _write_settings(partial, weights, config, stored)
        for done in weights.write(partial / "model.safetensors"):
            yield replace(phase, done=done), None


def _origin(found: Checkpoint, file: Path, stored: str) -> Origin:
    """Named by the repo that the file is of, else by its path."""
    return Origin(found.repo or str(file.absolute()), str(file.resolve()), stored)


def _write_settings(folder: Path, weights: GgufWeights, config: Any, stored: str) -> None:
    _write_config(folder, weights.header, config, stored)
    write_tokenizer(folder, weights.file, weights.header.metadata)


def _write_config(folder: Path, header: GgufHeader, config: Any, stored: str) -> None:
    dtype = str(DTYPES[stored][0]).removeprefix("torch.")
    ends = end_tokens(header)
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id")}
    if SUPPRESSED in header.metadata:  # of Gemma 4's 12B; a note at the load names it
        generation["suppress_tokens"] = header.metadata[SUPPRESSED]
    paths.write_text(folder / "config.json", json.dumps({**config, "dtype": dtype}, indent=2))
    paths.write_text(
        folder / "generation_config.json", json.dumps(generation | {"eos_token_id": ends})
    )
