"""The state of an unfinished training stage on disk: heads, optimizers, adapter and steps done."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from medusa_chat import paths
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, UsageError, first_line
from medusa_chat.training.optimizers import Optimizers
from medusa_chat.training.stage_recipes import HeadRecipe, JointRecipe


def save_state(
    path: Path | None,
    heads: MedusaHeads,
    optimizers: Optimizers,
    recipe: HeadRecipe | JointRecipe,
    adapter: Callable[[], dict[str, torch.Tensor]] | None,
    step: int,
) -> None:
    """Write the state after `step` steps; every tensor in its own shape and dtype. path: None
    writes nothing. adapter: gives that of a Medusa-2 stage. Raises MedusaChatError."""
    if path is None:
        return
    saved = {
        "heads": heads.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers],
        "step": step,
        "recipe": asdict(recipe),
    }
    write_state(path, saved if adapter is None else {**saved, "adapter": adapter()})


def restore_state(
    path: Path | None, heads: MedusaHeads, optimizers: Optimizers, recipe: HeadRecipe | JointRecipe
) -> dict[str, Any]:
    """Load the state at `path` into heads and optimizers. Returns what was saved, which holds
    "step" (steps done) and for Medusa-2 "adapter"; empty without a file. Raises UsageError for the
    state of another recipe."""
    if path is None or not path.exists():
        return {}
    saved: dict[str, Any] = torch.load(path, weights_only=True, map_location=heads.weight.device)
    if not _is_same(saved["recipe"], asdict(recipe)):
        raise UsageError(f"{path} belongs to another recipe: remove it, or use the same options")
    heads.load_state_dict(saved["heads"])
    for (optimizer, _), values in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return saved


def _is_same(saved: dict[str, Any], recipe: dict[str, Any]) -> bool:
    """Whether the options of today are those of a state; an older version may have had more."""
    return all(
        _is_same(saved.get(key, {}), value) if isinstance(value, dict) else saved.get(key) == value
        for key, value in recipe.items()
    )


def write_state(path: Path, saved: dict[str, Any]) -> None:
    """Write a new file beside `path` and replace `path` with it. Raises MedusaChatError where that
    fails; the old file stays."""
    partial = path.with_suffix(".part")
    try:
        torch.save(saved, partial)
        paths.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        partial.unlink(missing_ok=True)
        raise MedusaChatError(
            f"cannot write the training state to {path.parent} ({first_line(error)}): free some "
            "disk space and continue with --resume"
        ) from error
