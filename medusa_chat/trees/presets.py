"""Trees by name or from a JSON file, and the published accuracies of heads. Needs no torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError

MAX_BYTES = 1_000_000
RANKS = 10  # of each head of `published_accuracies`


def tree_names() -> tuple[str, ...]:
    """Names of the trees in presets/, sorted; without "auto"."""
    return tuple(sorted(file.stem for file in paths.preset("trees").glob("*.json")))


def load_tree(name: str, nodes: int | None = None) -> Tree:
    """The tree of a preset or a JSON file, cut to its first `nodes` nodes, including the root.

    A file has {"choices": [...]} or only the list, like `medusa_choices` of the reference. Raises
    UsageError, also if the tree has fewer nodes.
    """
    tree = _read_tree(_tree_file(name))
    if nodes is None:
        return tree
    if not 1 <= nodes <= len(tree):
        raise UsageError(
            f"nodes is {nodes}: tree {name} allows 1 to {len(tree)} nodes, including the root"
        )
    return tree.head(nodes)


def published_accuracies() -> tuple[tuple[float, ...], ...]:
    """Accuracy of each rank of each head of the first published heads, the default for heads
    without a calibration. [k][i] as in a calibration."""
    values = _read_json(paths.preset("head_accuracy.json"))
    return tuple(tuple(_each_rank(curve)) for curve in values["cumulative"])


def _each_rank(curve: Sequence[float]) -> list[float]:
    """Accuracies of single ranks from cumulative ones, extrapolated by the last ratio."""
    alone = [b - a for a, b in zip((0.0, *curve), curve, strict=False)]
    ratio = alone[-1] / alone[-2]
    while len(alone) < RANKS:
        alone.append(alone[-1] * ratio)
    return alone


def _tree_file(name: str) -> Path:
    if name in tree_names():
        return paths.preset("trees", f"{name}.json")
    if _is_file(name):
        return Path(name)
    names = ", ".join(("auto", *tree_names()))
    raise UsageError(f"there is no tree {name[:80]!r}: give a JSON file, or one of {names}")


def _is_file(name: str) -> bool:
    """Path.is_file, but False for invalid names (null bytes, too long)."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _read_tree(file: Path) -> Tree:
    try:
        return _tree(_read_json(file))
    except UsageError as error:
        raise UsageError(f"tree file {file}: {str(error)[:200]}") from None


def _read_json(file: Path) -> Any:
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"larger than {MAX_BYTES // 1_000_000} MB")
        return json.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(error.strerror or "cannot be read") from None
    except (ValueError, RecursionError):  # also not UTF-8, numbers of 5000 digits
        raise UsageError("not JSON") from None


def _tree(value: Any) -> Tree:
    choices = value.get("choices") if isinstance(value, dict) else value
    if not isinstance(choices, list) or not all(map(_is_ranks, choices)):
        raise UsageError(
            'give {"choices": [[0], [1], [0, 0]]} or only the list, with ranks from 0 to '
            f"{MAX_NODES - 1}"
        )
    return Tree.from_choices(choices)


def _is_ranks(value: Any) -> bool:
    """Whether a JSON value is a list of valid ranks."""
    return isinstance(value, list) and all(
        type(rank) is int and 0 <= rank < MAX_NODES for rank in value
    )
