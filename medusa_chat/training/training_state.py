"""The state of an unfinished training stage on disk: heads, optimizers, adapter and steps done."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, UsageError, first_line
from medusa_chat.training.optimizers import Optimizers
from medusa_chat.training.stage_recipes import HeadRecipe, JointRecipe


def save_state(
    path: Path,
    heads: MedusaHeads,
    optimizers: Optimizers,
    step: int,
    recipe: HeadRecipe | JointRecipe,
    adapter: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the state after `step` steps; every tensor in its own shape and dtype. adapter: of a
    Medusa-2 stage, as `adapter_tensors` gives it. Raises MedusaChatError."""
    saved = {
        "heads": heads.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers],
        "step": step,
        "recipe": asdict(recipe),
    }
    write_state(path, saved if adapter is None else {**saved, "adapter": adapter})


def restore_state(
    path: Path | None,
    heads: MedusaHeads,
    optimizers: Optimizers,
    recipe: HeadRecipe | JointRecipe,
) -> dict[str, Any]:
    """Load the state at `path` into heads and optimizers. Returns what was saved, which holds
    "step" (steps done) and for Medusa-2 "adapter"; empty without a file. Raises UsageError for the
    state of another recipe."""
    if path is None or not path.exists():
        return {}
    saved: dict[str, Any] = torch.load(path, weights_only=True, map_location=heads.weight.device)
    if saved["recipe"] != asdict(recipe):
        raise UsageError(f"{path} belongs to another recipe: remove it, or use the same options")
    heads.load_state_dict(saved["heads"])
    for (optimizer, _), values in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return saved


def write_state(path: Path, saved: dict[str, Any]) -> None:
    """Write a new file beside `path` and replace `path` with it. Raises MedusaChatError where that
    fails; the old file stays."""
    partial = path.with_suffix(".part")
    try:
        torch.save(saved, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        partial.unlink(missing_ok=True)
        raise MedusaChatError(
            f"cannot write the training state to {path.parent} ({first_line(error)}): free some "
            "disk space and continue with --resume"
        ) from error
