"""The seam for drafters: what one is told of the text, what it proposes, what a step asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.draft import Draft, Plan
from medusa_chat.decoding.drafters.kinds import Kind
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.tree import Tree


@dataclass(frozen=True, eq=False)
class Features:
    """Rows of the backbone that just became text, of a prompt's chunk or of an accepted path.

    tokens: their m ids. final [m, d]: their states after the final norm, on the backbone's device
    and in the pass's dtype; taps [m, k, d]: the residual at the layers that the drafter names;
    None where the drafter does not read them.
    """

    tokens: Sequence[int]
    final: Tensor | None = None
    taps: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a drafter proposes, of which the tree builder keeps the most probable nodes. tree,
    tokens: of n nodes, the root first. shares: the drafter's probability of each given its parent
    (that of the root is not read). passes: of the drafter that it took, for the budget. sources:
    what proposed each, None for the root; empty where that is the drafter's kind.source."""

    tree: Tree
    tokens: Sequence[int]
    shares: Sequence[float]
    passes: float = 1.0
    sources: Sequence[Source | None] = ()


class Drafter(Protocol):
    """A drafter with a state of its own, made once at the load, which follows the engine's text.

    kind: what it is. length: the number of tokens of the text that it has been told. The engine
    crops it together with its own cache, so that those are always a prefix of the engine's text.
    reads_states: whether Features have `final`; then the engine rereads what it was not told.
    taps: the places in transformers' `hidden_states` that Features have as `taps`.
    """

    kind: Kind
    taps: Sequence[int]
    reads_states: bool
    length: int

    def crop(self, length: int) -> None:
        """Forget everything after the first `length` tokens; fewer stay as they are."""

    def observe(self, features: Features) -> None:
        """Take the next rows of the text."""

    def draft(self, root: int, depth: int, allowance: Allowance) -> Candidates:
        """The candidates after the text and the root, at most `depth` deep; none deeper than pays
        by the allowance, whose nodes count the root."""


@runtime_checkable
class Levels(Protocol):
    """A drafter with a distribution for each depth, whatever is drafted before it. It keeps no
    state, and never waits for the device, so that it drafts within a recorded step."""

    kind: Kind

    def require(self, tree: Tree) -> None:
        """Raises UsageError for a tree that it cannot fill."""

    def guesses(
        self, hidden: Tensor, root: Tensor, depth: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best guesses at each depth after the root int64 [1], predicted from hidden [1, d]:
        logits and tokens int64 [depth, width], falling, and log(sum(exp)) of all logits float32
        [depth]."""


class Drafting(Protocol):
    """Drafts one answer, in two calls a step: `plan` on the host, then `fill` with the tokens on
    the device. drafter: the one that follows the text; None where there is none."""

    drafter: Drafter | None

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        """The plan of the next draft.

        tokens: the ids added to the text since the last call (first the prompt), the root last.
        depth: the largest depth that the context has room for.
        """

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor, details: bool) -> Draft:
        """The draft of `plan`. root int64 [1], on the device; hidden [1, d]: the backbone's hidden
        state that predicted the root; details: whether the draft has probabilities."""

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Record the last step: its number of nodes, and the accepted ones, the root first."""
