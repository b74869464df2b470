"""What `--tree auto` means for a model: which tree, cut to how many nodes, and why."""

import hashlib
import json
from typing import TYPE_CHECKING

from medusa_chat.decoding.accept_length import Accuracies
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError
from medusa_chat.messages import TreeFacts
from medusa_chat.trees.calibration import Calibration
from medusa_chat.trees.tuning_store import Tuning

CANDIDATES = 2  # of a step, for each node that pays on average
FEW = 4  # nodes, of which a row costs what it computes: no second guess is worth that

if TYPE_CHECKING:
    import torch


def auto_tree(
    calibration: Calibration | None,
    heads: int,
    device: "torch.device",
    usual: int,
    nodes: int | None = None,
    tuned: Tuning | None = None,
) -> tuple[Tree, str]:
    """What `--tree auto` means: the checkpoint's calibrated tree, else a published one, pruned to
    the heads and cut to `nodes`, else to what the tuner's measured costs make the best, else to
    the `usual` ones; and why.
    """
    origin = calibration.origin if calibration else "the published mc_sim_7b_63"
    source = source_tree(calibration, heads)
    if nodes is not None and nodes > len(source):
        raise UsageError(f"nodes is {nodes}: {origin} has {len(source)} nodes for {heads} heads")
    if nodes is None and tuned is not None and heads:
        accuracies = rank_accuracies(calibration)
        tree = source.head(tuned.pick(source, accuracies).nodes)
        why = f"{origin}, {tuned.reason(source, accuracies)}"
        found = candidates(calibration, heads, device, tree)
        if found is not None:
            why += f"; each step drafts what the heads are sure of, among {len(found)} nodes"
        return tree, why
    tree = source.head(nodes or usual)
    return tree, f"{origin}, {len(tree)} nodes for {device.type}"


def usual_nodes(device: "torch.device", precision: str, is_native: bool) -> int:
    """Nodes of a step whose costs were not measured: 4 on a CPU in fp32 or where C decodes (rows
    cost what they compute) and 16 on it otherwise, 64 on a GPU and 32 there at 4 bit."""
    if device.type == "cpu":
        return 4 if is_native or precision == "fp32" else 16
    return 32 if precision == "nf4" else 64


def candidates(
    calibration: Calibration | None, heads: int, device: "torch.device", tree: Tree
) -> Tree | None:
    """Nodes of which each step may draft any, where `tree` pays best on average. None where what
    is drafted is fixed: on a device that records a step for one tree, and where no draft pays."""
    if len(tree) == 1 or device.type != "cpu":
        return None
    if len(tree) <= FEW:
        return tree
    return source_tree(calibration, heads).pruned(tree.depth).head(CANDIDATES * len(tree))


def source_tree(calibration: Calibration | None, heads: int) -> Tree:
    """The whole tree that auto cuts: as deep as there are heads."""
    from medusa_chat.trees.presets import load_tree

    source = calibration.tree if calibration else load_tree("mc_sim_7b_63")
    return source.pruned(min(heads, len(rank_accuracies(calibration)))) if heads else source


def rank_accuracies(calibration: Calibration | None) -> Accuracies:
    """The checkpoint's own, else those of published heads."""
    from medusa_chat.trees.presets import published_accuracies

    return calibration.accuracies if calibration else published_accuracies()


def tree_facts(
    name: str,
    parameters: int,
    heads: int,
    calibration: Calibration | None,
    tuned: Tuning | None,
    stored: Calibration | None = None,
) -> TreeFacts | None:
    """What the auto tree follows from, for the page; None without heads.

    stored: the checkpoint's own calibration where `calibration` is a personal tree's.
    """
    if not heads:
        return None
    own = stored or (None if calibration and calibration.is_personal else calibration)
    accuracies = tuple(tuple(row) for row in rank_accuracies(own)[:heads])
    words = json.dumps([name, parameters, heads, accuracies])
    costs = tuned.costs if tuned else None
    return TreeFacts(
        key=hashlib.sha256(words.encode()).hexdigest()[:24],
        accuracies=accuracies,
        choices=source_tree(calibration, heads).choices[1:],
        is_calibrated=own is not None,
        is_personal=calibration is not None and calibration.is_personal,
        measured_on=own.measured_on if own else "",
        positions=own.positions if own else 0,
        rates=own.rates if own else (),
        sizes=costs.sizes if costs else (),
        lengths=costs.lengths if costs else (),
        seconds=costs.seconds if costs else (),
        date=tuned.date if tuned else "",
    )
