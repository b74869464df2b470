"""The values that front ends and the model exchange: plain, typed and picklable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")
# {"role": "system" | "user" | "assistant", "content": text}; an answer may have "reasoning" too.
# Without that key, any reasoning is in the content, as the model wrote it.
Message = dict[str, str]
Text = Sequence[Message] | str  # a conversation, or raw text without chat template


@dataclass(frozen=True)
class TokenIds:
    """A raw text as ids of the model's tokens, none of which is added to. begun: how many of them,
    the last ones, begin the answer already: their text comes with its first event."""

    ids: tuple[int, ...]
    begun: int = 0


@dataclass(frozen=True)
class Fresh:
    """A text to answer from an empty cache, so that two answers can be timed against each other."""

    text: Text


Prompt = Text | TokenIds | Fresh


class Request(Generic[V]):
    """A request to a model. V: the type of the values that it yields."""


@dataclass(frozen=True)
class LoadRequest(Request["LoadPhase"]):
    """The model to load. checkpoint: "demo", a folder, a GGUF file or a Hub id. None: default.

    tree, nodes: the only tree that will be used, so deeper heads are not read; None: all heads.
    drafts: the drafter beside it, or two smaller models that draft together, named as a checkpoint
    is.
    """

    checkpoint: str = "demo"
    backbone: str | None = None
    precision: str = "auto"
    device: str = "auto"
    max_context: int | None = None
    offline: bool = False
    tree: str | None = None
    nodes: int | None = None
    drafts: tuple[str, ...] = ()


@dataclass(frozen=True)
class TreeFacts:
    """What the auto tree of a model with heads follows from.

    accuracies[k][i]: the checkpoint's own rank accuracies where is_calibrated, else published ones.
    choices: the whole tree that auto cuts, in order of value, the root left out. measured_on,
    positions, rates ((nodes, tokens a step)): of the calibration.
    """

    accuracies: tuple[tuple[float, ...], ...]
    choices: tuple[tuple[int, ...], ...]
    is_calibrated: bool
    measured_on: str = ""
    positions: int = 0
    rates: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ModelInfo:
    """The loaded model in words a status bar can show. heads: 0 without Medusa heads. backbone: its
    Hub id or place, where that is not the checkpoint itself. drafts: the names of what drafts
    beside it, beside: its kind.

    memory_bytes: what weights, heads and cache were measured to take; estimated_bytes: what the
    estimate made before says of the same parts, 0 where there is none. memory: the whole estimate
    in words (Estimate.words), empty where there is none.

    tree, nodes, tree_reason: what `--tree auto` means here and why. notes: what was chosen at
    load (attention, packed linears) and every fallback, a sentence each. tree_facts: what tree and
    nodes follow from; None without heads. sampling: the defaults of its own generation config, by
    the names of GenerationSettings; empty where it names none. backend: what runs a step. template:
    whose chat template it is. licence: of its weights; empty where its files name none.
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
    notes: tuple[str, ...] = ()
    estimated_bytes: int = 0
    memory: str = ""
    tree_facts: TreeFacts | None = None
    backbone: str = ""
    drafts: tuple[str, ...] = ()
    beside: str = ""
    backend: str = ""
    template: str = ""
    licence: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadPhase:
    """One phase of a load, yielded when it starts; the last one is "ready" and has the model.

    name: "resolve", "download", "read", "quantise", "check", "warm up" or "ready"; unnecessary
    phases are skipped. "download" is yielded about five times a second, with done and total in
    bytes (without cached files) and rate in bytes per second, 0 while unknown. note: what a GGUF
    file is unpacked to, and how much memory that takes.
    """

    name: str
    model: ModelInfo | None = None
    done: int = 0
    total: int = 0
    rate: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a model would be loaded into, in bytes. device: torch's name. free: available
    to the next model, after the current one is freed. precision: the one that this device computes
    fastest, empty where unknown. has_int8: whether our CUDA product multiplies int8 there."""

    device: str
    free: int
    total: int
    precision: str = ""
    has_int8: bool = False


# In these phases of a load the previous model still exists; then it is freed.
BEFORE_READING = ("resolve", "download")


class Ranked(NamedTuple):
    """A token in a distribution. rank: 1 for the most probable."""

    id: int
    text: str
    probability: float
    rank: int


@dataclass(frozen=True)
class PeekRequest(Request["Peek"]):
    """Request for the distribution after `token_ids` and `path`; yields one Peek, decodes nothing.

    token_ids: the text before the root of a step's tree. path: the tree's tokens from the root to
    the node (empty: after token_ids). head: also the distribution of this Medusa head, from 1, at
    the end of token_ids, where it drafted (0: none). temperature: for the backbone; 0 counts as 1,
    as in a step's record. Heads draft at 1. tokens: ids to rank even beyond the first `top`.
    """

    token_ids: tuple[int, ...]
    path: tuple[int, ...] = ()
    head: int = 0
    temperature: float = 1.0
    tokens: tuple[int, ...] = ()
    top: int = 10


@dataclass(frozen=True)
class Peek:
    """The result of a PeekRequest, most probable first. asked, asked_head: its `tokens`."""

    backbone: tuple[Ranked, ...]
    head: tuple[Ranked, ...] = ()
    asked: tuple[Ranked, ...] = ()
    asked_head: tuple[Ranked, ...] = ()


@dataclass(frozen=True)
class CountRequest(Request["Count"]):
    """Request for the length of the last message of a conversation; yields one Count, decodes
    nothing."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Count:
    """The result of a CountRequest, in tokens. message: of the last message with its markup, and of
    what stands before the first message of the user with it. left: of the context, after the whole
    conversation; negative where it is too long."""

    message: int
    left: int


def without_broken_characters(text: str) -> str:
    """The text with surrogate pairs joined, lone surrogates as U+FFFD, and no null bytes."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.replace("\0", "")
