"""What `--tree auto` means for a model: which tree, of how many nodes, and why."""

from dataclasses import dataclass

from medusa_chat.decoding.budget import StepTimes
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError
from medusa_chat.messages import TreeFacts
from medusa_chat.trees.calibration import Calibration
from medusa_chat.trees.expected_length import Accuracies, expected_lengths
from medusa_chat.trees.presets import load_tree, published_accuracies

CANDIDATES = 2  # nodes that the heads fill for each one that pays on average, where drafts are cut
SIZES = (4, 8, 16, 32, 64)  # nodes of a tree, before anything is cut
LEAST = 4  # nodes that should pay, where drafts are cut: a step that is sure of less drafts less


@dataclass(frozen=True)
class AutoTree:
    """tree: what the heads fill. nodes: how many of it should pay best. expected[m - 1]: tokens a
    step with the first m of these. why: in words."""

    tree: Tree
    nodes: int
    expected: tuple[float, ...]
    why: str


def auto_tree(
    calibration: Calibration | None,
    heads: int,
    times: StepTimes,
    is_cut: bool,
    nodes: int | None = None,
) -> AutoTree:
    """The checkpoint's calibrated tree, else a published one, pruned to the number of heads and cut
    to `nodes`, else to the size that pays best by the times of steps. is_cut: each draft keeps the
    nodes that are worth their time, so that the tree has more of them. Raises UsageError for more
    nodes than the tree has.
    """
    origin = "the checkpoint's calibrated tree" if calibration else "the published mc_sim_7b_63"
    source = source_tree(calibration, heads)
    expected = expected_lengths(source, rank_accuracies(calibration))
    if nodes is not None:
        if nodes > len(source):
            raise UsageError(
                f"nodes is {nodes}: {origin} has {len(source)} nodes for {heads} heads, give at "
                f"most {len(source)}"
            )
        return AutoTree(source.head(nodes), nodes, expected[:nodes], f"{origin}, {nodes} nodes")
    count = best_size(expected, times)
    if not is_cut:
        why = f"{origin}, at most {count} nodes: how many pay is learnt from the steps"
        return AutoTree(source.head(count), count, expected[:count], why)
    count = min(max(count, LEAST), len(source))
    tree = source.pruned(source.head(count).depth).head(CANDIDATES * count)
    why = f"{origin}; each step drafts what pays, among {len(tree)} nodes"
    return AutoTree(tree, count, expected[:count], why)


def best_size(expected: tuple[float, ...], times: StepTimes) -> int:
    """The number of nodes, of SIZES or all, with the most expected tokens over their cost; plain
    decoding wins a tie."""
    costs = times.costs()
    rates = {1: 1.0}
    for nodes in (*(n for n in SIZES if n < len(expected)), len(expected)):
        if 1 < nodes <= len(costs):
            rates[nodes] = expected[nodes - 1] / (costs[nodes - 1] + times.draft)
    return max(rates, key=rates.__getitem__)


def source_tree(calibration: Calibration | None, heads: int) -> Tree:
    """The whole tree that auto cuts: as deep as there are heads."""
    source = calibration.tree if calibration else load_tree("mc_sim_7b_63")
    return source.pruned(min(heads, len(rank_accuracies(calibration)))) if heads else source


def rank_accuracies(calibration: Calibration | None) -> Accuracies:
    """The checkpoint's own, else those of published heads."""
    return calibration.accuracies if calibration else published_accuracies()


def tree_facts(heads: int, calibration: Calibration | None) -> TreeFacts | None:
    """What the auto tree follows from, for the page; None without heads."""
    if not heads:
        return None
    return TreeFacts(
        accuracies=tuple(tuple(row) for row in rank_accuracies(calibration)[:heads]),
        choices=source_tree(calibration, heads).choices[1:],
        is_calibrated=calibration is not None,
        measured_on=calibration.measured_on if calibration else "",
        positions=calibration.positions if calibration else 0,
        rates=tuple(calibration.rates.items()) if calibration else (),
    )
