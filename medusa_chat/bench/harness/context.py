"""BenchContext: what all studies of one run share; and the machine they run on."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from medusa_chat.bench.harness.report_data import Report
from medusa_chat.checkpoints.devices import describe_device
from medusa_chat.checkpoints.load import LoadedModel, load
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.presets import load_tree

PROMPTS = (
    "I want to book a table for two in San Jose tonight.",
    "What is the capital of Spain?",
    "Tell me a story about a fox and a lost lamp.",
    "Find me a hotel in London with a good rating, please.",
    "Why are you fast?",
    "What movies are playing near me this weekend?",
)


@dataclass(frozen=True)
class BenchContext:
    """One loaded model and how it is measured. budget: seconds a study may spend on one figure.
    prompts: a file of questions for the studies of the paper's findings. draft: the folder of a
    draft model for assisted generation. data: conversations for the studies that train. reference:
    a checkout of the paper's own code. medusa_2: a checkpoint of `train --method medusa-2` for the
    ladder. settings: how the answers of a report are made, and report takes them."""

    request: LoadRequest
    loaded: LoadedModel
    tree: str
    rounds: int
    max_new_tokens: int
    progress: Callable[[str], None]
    budget: float = 1.0
    prompts: Path | None = None
    draft: Path | None = None
    data: Path | None = None
    reference: Path | None = None
    medusa_2: Path | None = None
    settings: GenerationSettings = field(default_factory=GenerationSettings)
    report: Report | None = None

    @property
    def command(self) -> str:
        """How our own contestants are asked for."""
        return f"medusa-chat bench --tree {self.tree} --max-new-tokens {self.max_new_tokens}"

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        if self.loaded.engine.backbone.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.engine.backbone.device)


def read_model(request: LoadRequest, progress: Callable[[str], None]) -> LoadedModel:
    """The model of `request`, every phase told to `progress`."""
    loaded = None
    for phase, model in load(request):
        progress(f"loading: {phase.name}")
        loaded = model
    assert loaded is not None
    return loaded


def with_checkpoint(context: BenchContext, checkpoint: Path) -> BenchContext:
    """The same course for another checkpoint with heads. Raises UsageError for one without."""
    asked = replace(context.request, checkpoint=str(checkpoint), backbone=None)
    loaded = read_model(asked, context.progress)
    if not loaded.info.heads:
        raise UsageError(f"{checkpoint} has no Medusa heads: there is nothing to compare")
    return replace(context, request=asked, loaded=loaded)


def machine(context: BenchContext, prompts: int) -> dict[str, Any]:
    """What the figures were measured on."""
    info, device = context.loaded.info, context.loaded.engine.backbone.device
    is_auto = context.tree == "auto"
    shape = info.tree_reason if is_auto else f"{len(load_tree(context.tree))} nodes"
    whole, words = context.loaded.engine.backbone.whole_step, describe_device(device)
    if whole is not None and whole.threads:
        words += f" of torch, {whole.threads} of our C"
    return {
        "device": f"{info.device} ({words}, {os.cpu_count()} cores)",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": f"{info.name}, {info.parameters / 1e6:.1f} M parameters, {info.precision}",
        "tree": f"{context.tree}: {shape}",
        "prompts": prompts,
    }
