"""What crosses the border between a front end and the model: plain, typed, picklable values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")
# {"role": "system" | "user" | "assistant", "content": text}, of an answer also "reasoning" where it
# has some; one without that key has its reasoning in the content, if any, as the model wrote it
Message = dict[str, str]
Text = Sequence[Message] | str  # a conversation, or a raw text without chat template


@dataclass(frozen=True)
class Fresh:
    """A text to be answered from an empty cache: nothing of what was said before is reused.

    Two answers that are timed against each other both start like this.
    """

    text: Text


Prompt = Text | Fresh


class Request(Generic[V]):
    """Something a front end asks of a model: one subclass for each. V: the type of what comes
    back, value by value."""


@dataclass(frozen=True)
class LoadRequest(Request["LoadPhase"]):
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
    Hub id or place, where that is not the checkpoint itself.

    memory_bytes: what weights, heads and cache were measured to take; estimated_bytes: what the
    estimate made before says of the same parts, 0 where there is none.

    tree, nodes, tree_reason: what `--tree auto` means here and why. notes: what was chosen at
    load (attention, packed linears) and every fallback, a sentence each. tree_facts: what tree and
    nodes follow from; None without heads.
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
    tree_facts: TreeFacts | None = None
    backbone: str = ""


@dataclass(frozen=True)
class LoadPhase:
    """One phase of loading, told when it begins; the last one is "ready" and carries the model.

    name: "resolve", "download", "read", "convert", "quantise", "check", "warm up" or "ready"; what
    need not be done is left out. A "download" is told about five times a second: done and total in
    bytes, what was here before not counted; rate in bytes a second, 0 while unknown. So is a
    "convert", of bytes to be written; note: what is converted, and what that takes.
    """

    name: str
    model: ModelInfo | None = None
    done: int = 0
    total: int = 0
    rate: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the memory a model would be loaded into. device: as torch names it. free: what
    the next model may take, the present one being gone by then."""

    device: str
    free: int
    total: int


# The phases in which the model loaded before is still there; then it is freed.
BEFORE_READING = ("resolve", "download")


class Ranked(NamedTuple):
    """A token as one place of the text saw it. rank: from 1, the most probable."""

    id: int
    text: str
    probability: float
    rank: int


@dataclass(frozen=True)
class PeekRequest(Request["Peek"]):
    """What would come next after `token_ids` and `path`? Nothing is decoded; one Peek comes back.

    token_ids: the text up to and without the root of a step's tree. path: the tree's tokens from
    the root to the node that is asked (empty: after token_ids). head: also ask this Medusa head,
    from 1, at the place it drafted from, the end of token_ids (0: none). temperature: the
    backbone's; 0 counts as 1, as in a step's record. Heads draft at 1. tokens: ids whose place is
    wanted even beyond the first `top`.
    """

    token_ids: tuple[int, ...]
    path: tuple[int, ...] = ()
    head: int = 0
    temperature: float = 1.0
    tokens: tuple[int, ...] = ()
    top: int = 10


@dataclass(frozen=True)
class Peek:
    """The answer to a PeekRequest, most probable first; asked and asked_head: its `tokens`."""

    backbone: tuple[Ranked, ...]
    head: tuple[Ranked, ...] = ()
    asked: tuple[Ranked, ...] = ()
    asked_head: tuple[Ranked, ...] = ()


def without_broken_characters(text: str) -> str:
    """Halves of a character are joined, else they become U+FFFD; null bytes go."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.replace("\0", "")
