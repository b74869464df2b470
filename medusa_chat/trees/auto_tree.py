"""What `--tree auto` means for a model: which tree, cut to how many nodes, and why."""

from typing import TYPE_CHECKING

from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError
from medusa_chat.messages import TreeFacts
from medusa_chat.trees.calibration import Calibration
from medusa_chat.trees.expected_length import Accuracies, expected_lengths
from medusa_chat.trees.presets import load_tree, published_accuracies
from medusa_chat.trees.tuning_store import Tuning

CANDIDATES = 2  # candidate nodes for each node that pays on average
LEAST = 4  # nodes of a tree of which only a part pays, which each step drafts, or nothing

if TYPE_CHECKING:
    import torch


def auto_tree(
    calibration: Calibration | None,
    heads: int,
    device: "torch.device",
    usual: tuple[int, str],
    nodes: int | None = None,
    tuned: Tuning | None = None,
) -> tuple[Tree, str]:
    """The tree of `--tree auto` and why: the checkpoint's calibrated tree, else a published one,
    pruned to the number of heads and cut to `nodes`; without `nodes` to the size that pays best by
    the tuner's measured costs, and before the tuner ran to the `usual` nodes for their reason.
    Raises UsageError for more nodes than the tree has.
    """
    origin = "the checkpoint's calibrated tree" if calibration else "the published mc_sim_7b_63"
    source = source_tree(calibration, heads)
    if nodes is not None and nodes > len(source):
        raise UsageError(
            f"nodes is {nodes}: {origin} has {len(source)} nodes for {heads} heads, give at most "
            f"{len(source)}"
        )
    if nodes is None and tuned is not None and heads:
        expected = expected_tokens(calibration, heads)
        count, reason = tuned.pick(expected).nodes, tuned.reason(expected)
        if count == 1 and device.type == "cpu" and tuned.pays_below(LEAST, expected):
            count = LEAST
            reason = f"of which fewer than {LEAST} nodes should pay (measured on {tuned.date[:10]})"
        tree = source.head(count)
        why = f"{origin}, {reason}"
        found = candidates(calibration, heads, device, tree)
        if found is not None:
            why += f"; each step drafts what the heads are sure of, among {len(found)} nodes"
        return tree, why
    count, why = (nodes, f"for {device.type}") if nodes else usual
    tree = source.head(count)
    return tree, f"{origin}, {len(tree)} nodes {why}"


def expected_tokens(calibration: Calibration | None, heads: int) -> tuple[float, ...]:
    """Tokens a step with the first 1, 2, ... nodes of the whole tree that auto cuts."""
    return expected_lengths(source_tree(calibration, heads), rank_accuracies(calibration))


def candidates(
    calibration: Calibration | None, heads: int, device: "torch.device", tree: Tree
) -> Tree | None:
    """The tree of candidates from which each step drafts, where `tree` pays best on average. None
    where the draft is fixed: on a GPU, whose steps are recorded for one tree, and where drafting
    does not pay."""
    if len(tree) == 1 or device.type != "cpu":
        return None
    return source_tree(calibration, heads).pruned(tree.depth).head(CANDIDATES * len(tree))


def source_tree(calibration: Calibration | None, heads: int) -> Tree:
    """The whole tree that auto cuts: as deep as there are heads."""
    source = calibration.tree if calibration else load_tree("mc_sim_7b_63")
    return source.pruned(min(heads, len(rank_accuracies(calibration)))) if heads else source


def rank_accuracies(calibration: Calibration | None) -> Accuracies:
    """The checkpoint's own, else those of published heads."""
    return calibration.accuracies if calibration else published_accuracies()


def tree_facts(
    heads: int, calibration: Calibration | None, tuned: Tuning | None
) -> TreeFacts | None:
    """What the auto tree follows from, for the page; None without heads."""
    if not heads:
        return None
    costs = tuned.costs if tuned else None
    return TreeFacts(
        accuracies=tuple(tuple(row) for row in rank_accuracies(calibration)[:heads]),
        choices=source_tree(calibration, heads).choices[1:],
        is_calibrated=calibration is not None,
        measured_on=calibration.measured_on if calibration else "",
        positions=calibration.positions if calibration else 0,
        rates=tuple(calibration.rates.items()) if calibration else (),
        sizes=costs.sizes if costs else (),
        lengths=costs.lengths if costs else (),
        seconds=costs.seconds if costs else (),
        date=tuned.date if tuned else "",
    )
