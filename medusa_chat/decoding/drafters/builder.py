"""The tree builder: the tree of one step, made of its most probable nodes. No torch.

A node's probability is the product of the drafter's along its path, whether those depend on the
path (a draft model's) or on the depth alone (the heads'), so no node is more probable than its
parent. The m most probable nodes are therefore a tree, and the best tree of m nodes (the top
products of arXiv 2401.10774, section 2.3.3, with this step's probabilities instead of accuracies
over many texts). The learnt cost of a step of m nodes decides how many are kept. A continuation
from the text is one more path among the candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters.continuation import Guess
from medusa_chat.decoding.drafters.drafter import Candidates
from medusa_chat.decoding.drafters.kinds import MEDUSA, WITH_TEXT, Kind
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.tree import Tree

NONE = float("nan")
NO_GUESS = Guess((), (), ())


@dataclass(frozen=True, slots=True)
class MergedTree:
    """n nodes, the root first, parents before children. parents, ranks: as in Tree. shares: the
    drafter's probabilities (NaN for nodes that it did not propose). said: the sum of its
    probabilities of the nodes' whole paths."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    tokens: list[int]
    shares: list[float]
    sources: tuple[Source | None, ...]
    said: float


def merge(
    found: Candidates, guess: Guess | None, allowance: Allowance, kind: Kind = MEDUSA
) -> MergedTree:
    """The nodes that are worth their time among a drafter's candidates and the text's guess.

    A token that both propose below one node becomes one node with the larger of the two
    probabilities; if that is the text's, the token's siblings share the rest. No node is more
    probable than its parent. kind: of the drafter.
    """
    tree, tokens, shares = found.tree, found.tokens, found.shares
    guess = guess or NO_GUESS
    on_text, rest, end = _overlap(tree, tokens, shares, guess)
    probabilities = [1.0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        share = _share(shares[node])
        share *= 1.0 if parent else allowance.trust
        rate = on_text.get(node)
        share = share * rest.get(parent, 1.0) if rate is None else max(share, rate)
        probabilities.append(probabilities[parent] * share)
    for rate in guess.rates[len(on_text) :]:
        probabilities.append(probabilities[end] * rate)
        end = len(probabilities) - 1
    order = sorted(range(1, len(probabilities)), key=lambda node: -probabilities[node])
    count = allowance.cut([probabilities[node] for node in order[: allowance.nodes - 1]])
    kept = (0, *sorted(order[:count]))
    said = sum(probabilities[node] for node in kept[1:] if node < len(tree))
    made = _part(found, guess, on_text, kept, kind)
    return replace(made, said=said / allowance.trust)


def _share(value: float) -> float:
    """A drafter's probability; 0 for invalid numbers of broken ones."""
    return min(value, 1.0) if value > 0 else 0.0


def _overlap(
    tree: Tree, tokens: Sequence[int], shares: Sequence[float], guess: Guess
) -> tuple[dict[int, float], dict[int, float], int]:
    """(node -> rate, of the guess's tokens that are candidates; parent -> factor on the
    probabilities of these tokens' siblings; the node where the guess leaves the candidates)."""
    places = {(tree.parents[n], tokens[n]): n for n in range(len(tree) - 1, 0, -1)}
    on_text: dict[int, float] = {}
    rest: dict[int, float] = {}
    at = 0
    for token, rate in zip(guess.tokens, guess.rates, strict=True):
        node = places.get((at, token))
        share = 0.0 if node is None else _share(shares[node])
        if rate > share:
            rest[at] = (1 - rate) / (1 - share)
        if node is None:
            break
        on_text[node], at = rate, node
    return on_text, rest, at


def _part(
    found: Candidates,
    guess: Guess,
    on_text: dict[int, float],
    kept: tuple[int, ...],
    kind: Kind,
) -> MergedTree:
    """The tree of the nodes `kept`: candidates by number, then the nodes that the guess adds."""
    tree, tokens, shares = found.tree, found.tokens, found.shares
    count, known = len(tree), len(on_text)
    end = next(reversed(on_text), 0)  # where the guess leaves the candidates
    places = {node: place for place, node in enumerate(kept)}
    parents, ranks, made, own = [-1], [-1], [tokens[0]], [NONE]
    sources: list[Source | None] = [None]
    for node in kept[1:]:
        if node < count:
            parents.append(places[tree.parents[node]])
            ranks.append(tree.ranks[node])
            made.append(tokens[node])
            own.append(shares[node])
            own_source = found.sources[node] if found.sources else kind.source
            sources.append(WITH_TEXT[own_source] if node in on_text else own_source)
            continue
        is_first = node == count
        parents.append(places[end if is_first else node - 1])
        ranks.append(tree.width if is_first else 0)
        made.append(guess.tokens[known + node - count])
        own.append(NONE)
        sources.append("text")
    return MergedTree(tuple(parents), tuple(ranks), made, own, tuple(sources), 0.0)
