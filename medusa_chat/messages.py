"""What crosses the border between a front end and the model: plain, typed, picklable values."""

from collections.abc import Sequence
from dataclasses import dataclass

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
Prompt = Sequence[Message] | str  # a conversation, or a raw text without chat template


@dataclass(frozen=True)
class LoadRequest:
    """What to load. checkpoint: "demo", a folder or a Hub id; None elsewhere means: decide.

    tree, nodes: the only tree that will be asked for, so that heads deeper than it are not even
    read; without a tree all heads are kept.
    """

    checkpoint: str = "demo"
    backbone: str | None = None
    precision: str = "auto"
    device: str = "auto"
    max_context: int | None = None
    offline: bool = False
    tree: str | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class ModelInfo:
    """The loaded model in words a status bar can show. heads: 0 without Medusa heads.

    tree, nodes, tree_reason: what `--tree auto` means here and why. notes: what was chosen at
    load (attention, packed linears) and every fallback, a sentence each.
    """

    name: str
    family: str
    precision: str
    device: str
    parameters: int
    heads: int
    context: int
    tree: str
    nodes: int
    tree_reason: str
    memory_bytes: int
    has_template: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadPhase:
    """One phase of loading, told when it begins; the last one is "ready" and carries the model."""

    name: str
    model: ModelInfo | None = None
