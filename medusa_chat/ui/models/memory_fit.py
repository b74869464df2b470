"""Fit: how much memory a checkpoint would take, and whether that is free. No gradio."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from medusa_chat.checkpoints.inspection import NODES, PRECISIONS, Inspection
from medusa_chat.checkpoints.layouts.folders import BackboneFiles
from medusa_chat.checkpoints.memory_needs import (
    Estimate,
    automatic_precision,
    has_int8,
    measured,
)
from medusa_chat.checkpoints.memory_needs import estimates as estimates_of
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.gguf_files import is_gguf
from medusa_chat.hub import gb
from medusa_chat.hub.catalog import ModelPreset, shape
from medusa_chat.messages import DeviceMemory, LoadRequest
from medusa_chat.ui.models.checkpoint_lookup import MemoryTarget

TIGHT = 0.85  # of the free memory: above it, little is left for other programs
HEADS_UNKNOWN = 5  # of a preset that does not say; each with an LM head of its own
CPU_COLUMNS: tuple[str, ...] = ("fp32", "bf16", "int8", "nf4")  # there fp32 may be the fastest
GPU_COLUMNS: tuple[str, ...] = ("bf16", "int8", "nf4")
WORDS = {"fits": "fits", "tight": "tight", "large": "too large"}


@dataclass(frozen=True)
class Machine:
    """What rows are judged by. memory: None before it is known. is_online: whether the Hub answers;
    is_offline: whether it must not be asked. context: tokens as the program was
    started, None for as usual. in_use: names that are loaded or being loaded, with their bases;
    loaded: what that was asked for by."""

    memory: DeviceMemory | None = None
    target: MemoryTarget = MemoryTarget()
    is_online: bool = True
    is_offline: bool = False
    context: int | None = None
    in_use: frozenset[str] = frozenset()
    loaded: LoadRequest | None = None

    @property
    def is_cpu(self) -> bool:
        return not self.target.device.startswith("cuda")


def estimates(
    report: Inspection | None, preset: ModelPreset | None, context: int | None, target: MemoryTarget
) -> dict[str, Estimate]:
    """Memory by precision, for so many tokens or as many as usual: from the files, else from what
    the preset says of them; empty where nothing is known of the backbone's shape."""
    if report is not None and report.memory:
        full, tokens = report.context, context or report.usual_context
        return {p: parts.at_context(full, tokens) for p, parts in report.memory.items()}
    if preset is None or preset.shape is None:
        return {}
    files = _files_of(preset)
    model = sizes(files.config)
    tokens = min(context or model.context, model.positions)
    heads = preset.heads or HEADS_UNKNOWN
    rows = 0 if preset.layout == "B" else model.vocabulary  # B shares the backbone's LM head
    weights = heads * model.hidden * (model.hidden + rows)
    if preset.base and preset.bytes:
        weights = preset.bytes // 2  # they are kept in 16 bit
    found = estimates_of(files, None, tokens, NODES, *target)
    return {
        precision: replace(parts, heads=weights * (4 if precision == "fp32" else 2))
        for precision, parts in found.items()
    }


def _files_of(preset: ModelPreset) -> BackboneFiles:
    """The backbone's files, as far as a preset tells: of a GGUF file the name says its types."""
    config, size = shape(preset.shape or ""), preset.base_bytes or 0
    files = BackboneFiles("", config, (), (), size, True)
    if not preset.base or not is_gguf(preset.base):
        return files
    stored = re.split(r"[-.]", preset.base)[-2].upper()
    return replace(files, stored=stored, packed=size, table=size)  # its table is in blocks, too


def precision_taken(needed: Mapping[str, Estimate], machine: Machine, asked: str) -> str:
    """The precision that a load takes: as asked, or what auto is; empty while that is unknown."""
    if asked != "auto" or machine.memory is None:
        return "" if asked == "auto" else asked
    stored = next((p for p in needed if p not in PRECISIONS), "")  # a GGUF file as it is
    return automatic_precision(needed, machine.memory, machine.target.cpu, stored)


def taken_line(needed: Mapping[str, Estimate], taken: str, asked: str, machine: Machine) -> str:
    """What a load takes, in words, and what was measured of its precision; empty while that is
    unknown."""
    if taken not in needed:
        return ""
    name, known = f"auto takes {taken}" if asked == "auto" else taken, machine.memory
    is_ours = known is not None and has_int8(known, machine.target.cpu)
    said = measured(taken, machine.target.device, is_ours)
    return "; ".join(filter(None, (f"{name}, {needed[taken].words}", said)))


def longest_context(report: Inspection | None, preset: ModelPreset | None) -> int | None:
    """How many tokens the model can read; None where that is not known."""
    if report is not None and report.memory:
        return report.context
    return sizes(shape(preset.shape)).positions if preset and preset.shape else None


def fit_of(parts: Estimate, memory: DeviceMemory | None) -> str:
    """ "fits", "tight" or "large"; empty while nobody knows what is free."""
    if memory is None:
        return ""
    is_tight = parts.total - parts.program > TIGHT * memory.free
    return "large" if not parts.fits(memory.free) else "tight" if is_tight else "fits"


def cells(needed: Mapping[str, Estimate], machine: Machine, precision: str) -> list[dict[str, Any]]:
    """The memory cells of a row, one per precision. precision: the one that a load takes."""
    columns = CPU_COLUMNS if machine.is_cpu else GPU_COLUMNS
    columns = tuple("fp16" if c == "bf16" and precision == "fp16" else c for c in columns)
    columns = (*(p for p in needed if p not in PRECISIONS), *columns)  # a GGUF file as it is
    known = [column for column in columns if column in needed]
    fits = {column: fit_of(needed[column], machine.memory) for column in known}
    return [
        {
            "precision": column,
            "size": gb(needed[column].total),
            "fit": fit,
            "word": WORDS.get(fit, ""),
            "chosen": column == precision,
        }
        for column, fit in fits.items()
    ]


def warning(shown: Sequence[Mapping[str, Any]], precision: str) -> str:
    """The warning to confirm before a load that will not fit; empty where it may fit."""
    large = [cell for cell in shown if cell["fit"] == "large"]
    chosen = [cell for cell in shown if cell["chosen"]]
    fitting = [cell["precision"] for cell in shown if cell["fit"] in ("fits", "tight")]
    is_fine = bool(fitting) if precision == "auto" else not chosen or chosen[0] not in large
    if not large or is_fine:
        return ""
    size = (chosen or large)[-1]["size"]
    remedy = f"choose {fitting[-1]}" if fitting else "choose a smaller model"
    return f"It needs about {size}, and less is free: {remedy}, or a smaller context."


def memory_line(memory: DeviceMemory | None) -> str:
    """The free memory, in words; empty before it is known."""
    if memory is None:
        return ""
    target = "this GPU" if memory.device.startswith("cuda") else "this machine"
    return (
        f"{target} ({memory.device}) has {gb(memory.free)} of {gb(memory.total)} free for a model"
    )
