"""BenchContext: the loaded model and the options that all studies of a run share."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from medusa_chat.checkpoints.devices import describe_device
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.auto_tree import source_tree
from medusa_chat.trees.presets import load_tree
from medusa_chat.trees.shapes import chain
from medusa_chat.units import number

PROMPTS = (
    "I want to book a table for two in San Jose tonight.",
    "What is the capital of Spain?",
    "Tell me a story about a fox and a lost lamp.",
    "Find me a hotel in London with a good rating, please.",
    "Why are you fast?",
    "What movies are playing near me this weekend?",
)
CHAIN = 32  # nodes of the longest draft that is timed of a model without heads


@dataclass(frozen=True)
class BenchContext:
    """One loaded model and how it is measured. budget: seconds of a study for one figure.
    prompts: a file of questions; questions: how many of them, evenly spread, None: all. nodes: of
    the tree, several for the study "drafters" alone; none: as many as should pay. draft: the folder
    of a draft model for assisted generation. vllm: Python of its environment; vllm_heads: a
    checkpoint whose heads vLLM can read."""

    request: LoadRequest
    loaded: LoadedModel
    tree: str
    rounds: int
    max_new_tokens: int
    progress: Callable[[str], None]
    budget: float = 1.0
    prompts: Path | None = None
    questions: int | None = None
    nodes: tuple[int, ...] = ()
    draft: Path | None = None
    vllm: Path | None = None
    vllm_heads: Path | None = None

    @property
    def command(self) -> str:
        """The command line that measures our own decoding."""
        return f"medusa-chat bench --tree {self.tree} --max-new-tokens {self.max_new_tokens}"

    @property
    def size(self) -> int | None:
        """The nodes of the tree where --nodes is given once."""
        return next(iter(self.nodes), None)

    @property
    def source(self) -> Tree:
        """The whole tree that `--tree auto` cuts; without heads a chain of CHAIN nodes."""
        if not self.loaded.info.heads:
            return chain(CHAIN - 1)
        return source_tree(self.loaded.calibration, self.loaded.info.heads)

    @property
    def chosen_tree(self) -> Tree:
        """The tree that `--tree auto` decodes with, of --nodes nodes where they are given."""
        return self.source.head(min(self.size or self.loaded.info.nodes, len(self.source)))

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of a call, with the device's work."""
        self.synchronise()
        started = perf_counter()
        call()
        self.synchronise()
        return perf_counter() - started

    def synchronise(self) -> None:
        """Wait until the device has finished its work."""
        if self.loaded.engine.backbone.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.engine.backbone.device)


def read_model(request: LoadRequest, progress: Callable[[str], None]) -> LoadedModel:
    """The model of `request`. progress is called with every phase of the load."""
    loaded, told = None, ""
    for phase, model in load(request):
        if (line := phase.note or f"loading: {phase.name}") != told:
            told = line
            progress(line)
        loaded = model
    assert loaded is not None
    return loaded


def machine(context: BenchContext, prompts: int) -> dict[str, Any]:
    """The machine and the model of the figures. prompts: how many."""
    info, device = context.loaded.info, context.loaded.engine.backbone.device
    is_auto = context.tree == "auto"
    shape = info.tree_reason if is_auto else f"{len(load_tree(context.tree))} nodes"
    shape = shape if info.heads else "no heads, prompt lookup drafts a chain"
    words = f"{describe_device(device)}; steps by {context.loaded.engine.backend.name}"
    return {
        "device": f"{info.device} ({words}, {os.cpu_count()} cores)",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": f"{info.name}, {number(info.parameters)} parameters, {info.precision}",
        "tree": f"{context.tree}: {shape}",
        "prompts": prompts,
    }
