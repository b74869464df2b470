"""The files of a trained checkpoint, a folder that every other command takes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from medusa_chat import paths
from medusa_chat.checkpoints.head_tensors import tensors_of
from medusa_chat.checkpoints.locate import CALIBRATION_FILE, HEADS_FILE
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import MedusaChatError, UsageError, first_line
from medusa_chat.training.path_search import Answer, search_paths, tokens_per_step
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.tree_search import search_tree
from medusa_chat.trees.expected_length import expected_lengths

TREE_NODES = 64
USED_NODES = 16  # the first nodes, for which the tree is searched; larger trees extend it
SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Calibrated:
    """Rank accuracies a[k][i] of the heads, the paths (choices) of the best tree, and what was
    measured. positions: labels of the first head. rates: nodes -> tokens a step that the answers
    would have had with the tree, where it was searched by answers. shortlist: ids of the tokens
    that the heads may draft; empty: all."""

    accuracies: tuple[tuple[float, ...], ...]
    choices: tuple[tuple[int, ...], ...]
    measured_on: str
    positions: int
    rates: Mapping[int, float] = field(default_factory=dict)
    shortlist: tuple[int, ...] = ()

    @classmethod
    def search(
        cls,
        accuracies: Sequence[Sequence[float]],
        nodes: int,
        measured_on: str,
        positions: int,
        answers: Sequence[Answer] = (),
    ) -> "Calibrated":
        """The calibration with the best tree of at most `nodes` nodes: by the paths of whole
        answers where there are any, otherwise by products of accuracies. Raises UsageError."""
        table = tuple(tuple(round(a, 5) for a in row) for row in accuracies)
        if not answers:
            return cls(table, search_tree(table, nodes).choices[1:], measured_on, positions)
        tree = search_paths(answers, nodes, min(nodes, USED_NODES))
        rates = {n: round(tokens_per_step(answers, tree.head(n)), 3) for n in _sizes(tree)}
        return cls(table, tree.choices[1:], measured_on, positions, rates)

    @property
    def tree(self) -> Tree:
        return Tree.from_choices(self.choices)

    @property
    def expected(self) -> dict[int, float]:
        """Nodes -> tokens a step for sizes up to the tree's: by the answers where it was searched
        by them, otherwise by the accuracies."""
        lengths = expected_lengths(self.tree, self.accuracies)
        return {n: lengths[n - 1] for n in _sizes(self.tree)} | dict(self.rates)

    def to_json(self) -> dict[str, Any]:
        """The content of medusa_calibration.json."""
        shown = {"version": 1, "accuracies": self.accuracies, "choices": self.choices}
        rates = {"tokens_per_step": {str(n): rate for n, rate in self.rates.items()}}
        origin = {"measured_on": self.measured_on, "positions": self.positions}
        short = {"shortlist": self.shortlist} if self.shortlist else {}
        return {**shown, **origin, **(rates if self.rates else {}), **short}


def _sizes(tree: Tree) -> list[int]:
    return sorted({*(n for n in SIZES if n < len(tree)), len(tree)})


@dataclass(frozen=True)
class Base:
    """The backbone of the heads. name: as the user gave it; folder: None for a Hub id."""

    name: str
    folder: Path | None

    def seen_from(self, output: Path) -> str:
        """The value of `base_model_name_or_path` in `output`: a Hub id; a relative path for a
        folder beside or below, so that both can be moved together; otherwise the absolute path."""
        if self.folder is None:
            return self.name
        folder, near = self.folder.resolve(), output.resolve().parent
        is_near = folder.is_relative_to(near)
        return folder.relative_to(near).as_posix() if is_near else str(folder)


def write_checkpoint(output: Path, fill: Callable[[Path], None]) -> int:
    """Let `fill` write the folder `output`, whole or not at all. Returns its bytes.

    Raises UsageError where `output` exists and MedusaChatError where the disk is full."""
    try:
        return paths.write_folder(output, fill)
    except FileExistsError:
        raise UsageError(f"{output} exists: give another --output, or move it away") from None
    except (OSError, SafetensorError) as error:
        raise MedusaChatError(
            f"{output} cannot be written ({first_line(error)}): free some disk space and run the "
            "same command with --resume"
        ) from error


def write_heads(folder: Path, heads: MedusaHeads, calibrated: Calibrated) -> None:
    """Write the heads, in their own dtype and under the names of `tensors_of`, and
    their calibration."""
    save_file(tensors_of(heads.to("cpu")), folder / HEADS_FILE)
    (folder / CALIBRATION_FILE).write_text(json.dumps(calibrated.to_json()) + "\n", "utf-8")


def heads_config(heads: MedusaHeads, base: str) -> dict[str, Any]:
    """config.json of a folder with heads alone, in the reference's format."""
    return {
        "base_model_name_or_path": base,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.weight.shape[0],
        "version": "2" if heads.is_shared else "1",
    }


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write an indented JSON file."""
    file.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def write_adapter(
    folder: Path, tensors: dict[str, Tensor], names: Sequence[str], recipe: Recipe, base: str
) -> Path:
    """Write the adapter and its config in peft's format. tensors: as `adapter_tensors` gives them
    ([rank, in] and [out, rank]), written in their own dtype. names: of the layers it is on.
    Returns the file of the weights."""
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": recipe.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": recipe.lora_dropout,
        "target_modules": list(names),
        "bias": "none",
    }
    write_json(folder / "adapter_config.json", config)
    return file
