"""The checkpoint of a training: heads, heads with an adapter, or a whole model; and its card."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from medusa_chat import __version__, paths
from medusa_chat.checkpoints import weights
from medusa_chat.checkpoints.adapters import merge_adapter
from medusa_chat.checkpoints.head_weights import tensors_of
from medusa_chat.checkpoints.locate import CALIBRATION_FILE, HEADS_FILE
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, UsageError, first_line
from medusa_chat.training.recipe import Recipe, TrainRequest
from medusa_chat.training.setup import Base, TrainingSetup
from medusa_chat.trees.calibration import Calibration

FIGURES = re.compile(  # of a card, as `_figures` writes them
    r"^Measured on .*\n\r?\n\| head \| top-1 \| top-5 \|\r?\n(\|.*\n)+\r?\n"
    r"Tokens a step expected .*[^\r\n]",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Adapter:
    """A trained LoRA adapter: its tensors, as `adapter_tensors` gives them ([rank, in] and
    [out, rank]), and the names of the layers it is on. Without tensors there is none."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    layers: Sequence[str] = ()


def write_checkpoint(
    request: TrainRequest,
    setup: TrainingSetup,
    heads: MedusaHeads,
    calibrated: Calibration,
    adapter: Adapter,
) -> int:
    """Write the output of the request, whole or not at all -> its bytes. The heads' matrices
    [layers, K, d, d] and biases [layers, K, d] are written in the backbone's dtype; the adapter's
    tensors in their own, or merged into the backbone's weights. Raises UsageError where the output
    exists, and MedusaChatError where the disk is full."""
    recipe, output = request.recipe, request.output
    base = setup.base.seen_from(output)
    heads = heads.to(setup.model.dtype).requires_grad_(False)
    is_merged = recipe.method == "medusa-2" and recipe.output == "merged"
    if is_merged:
        setup.model = None  # frees the memory for the model that the adapter is merged into

    def fill(folder: Path) -> None:
        if is_merged:
            _write_merged(request, setup, folder, adapter, base)
        else:
            _write_json(folder / "config.json", _heads_config(heads, base))
            if adapter.tensors:
                _write_adapter(folder, adapter, recipe, base)
        write_heads(folder, heads, calibrated)
        card = model_card(setup.base, recipe, [path.name for path in request.data], calibrated)
        (folder / "README.md").write_text(card, "utf-8")

    try:
        return paths.write_folder(output, fill)
    except FileExistsError:
        raise UsageError(f"{output} exists: give another --output, or move it away") from None
    except (OSError, SafetensorError) as error:
        raise MedusaChatError(
            f"{output} cannot be written ({first_line(error)}): free some disk space and run the "
            "same command with --resume"
        ) from error


def _write_merged(
    request: TrainRequest, setup: TrainingSetup, folder: Path, adapter: Adapter, base: str
) -> None:
    """Write the whole model. The adapter is merged into the published weights in 16 bits, also
    where it was trained over quantised ones."""
    file = _write_adapter(folder, adapter, request.recipe, base)
    precision = "bf16" if setup.precision in ("nf4", "int8") else setup.precision
    model = weights.read_model(setup.source, setup.config, precision, torch.device("cpu"))
    merge_adapter(model, file).save_pretrained(folder)
    setup.tokenizer.save_pretrained(folder)
    file.unlink()
    file.with_name("adapter_config.json").unlink()


def write_heads(folder: Path, heads: MedusaHeads, calibrated: Calibration) -> None:
    """Write the heads in their own dtype, named as `tensors_of` has them, and their calibration."""
    save_file(tensors_of(heads.to("cpu")), folder / HEADS_FILE)
    (folder / CALIBRATION_FILE).write_text(json.dumps(calibrated.to_json()) + "\n", "utf-8")


def _heads_config(heads: MedusaHeads, base: str) -> dict[str, Any]:
    """config.json of a folder with heads alone, in the reference's format."""
    return {
        "base_model_name_or_path": base,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.weight.shape[0],
        "version": "2" if heads.is_shared else "1",
    }


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def _write_adapter(folder: Path, adapter: Adapter, recipe: Recipe, base: str) -> Path:
    """Write the adapter and its config in peft's format, every tensor in its own dtype -> the file
    of the weights."""
    file = folder / "adapter_model.safetensors"
    save_file(adapter.tensors, file)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": recipe.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": recipe.lora_dropout,
        "target_modules": list(adapter.layers),
        "bias": "none",
    }
    _write_json(folder / "adapter_config.json", config)
    return file


# ---------------------------------------------------------------------------------- the model card


def model_card(base: Base, recipe: Recipe, data: Sequence[str], calibrated: Calibration) -> str:
    """README.md of a checkpoint. data: the names of the files."""
    front = ["---", "library_name: medusa-chat", "tags: [medusa, speculative-decoding]"]
    if base.folder is None:
        front.append(f"base_model: {base.name}")
    whole = recipe.method == "medusa-2" and recipe.output == "merged"
    kind = "A whole model with its heads" if whole else "Heads; the backbone is not in here"
    answers = " (its prompts, answered by the backbone itself)" if recipe.distill else ""
    lm = "an LM head each" if recipe.own_lm_head else "the backbone's LM head"
    return "\n".join(
        [
            *front,
            "---",
            "",
            f"# Medusa heads for {base.name}",
            "",
            f"{kind}. {recipe.heads} heads of {recipe.head_layers} residual layers, with {lm}; "
            f"{recipe.method}, recipe {recipe.name}, made by medusa-chat {__version__}.",
            "",
            f"- Backbone: {base.name}",
            f"- Data: {', '.join(data)}{answers}",
            f"- Settings: {_settings(recipe)}",
            "",
            _figures(calibrated),
            "",
            "    medusa-chat --checkpoint THIS_FOLDER",
            "",
        ]
    )


def renew_figures(card: Path, calibrated: Calibration) -> bool:
    """Replace the figures that `model_card` wrote by those of a new calibration -> whether the card
    had any; the rest of it stays. Raises OSError."""
    try:
        text = card.read_bytes().decode() if card.is_file() else ""
    except UnicodeError:  # not one of ours
        return False
    end = "\r\n" if "\r\n" in text else "\n"
    figures = _figures(calibrated).replace("\n", end)
    renewed, count = FIGURES.subn(lambda _: figures, text, count=1)
    if count:
        mode = card.stat().st_mode
        paths.write_text(card, renewed)
        card.chmod(mode)
    return count > 0


def _figures(calibrated: Calibration) -> str:
    promised = ", ".join(f"{tokens:.2f} with {n}" for n, tokens in calibrated.expected.items())
    return "\n".join(
        [
            f"Measured on {calibrated.measured_on} ({calibrated.positions:,} positions):",
            "",
            "| head | top-1 | top-5 |",
            "|---|---|---|",
            *(
                f"| {head} | {row[0]:.3f} | {sum(row[:5]):.3f} |"
                for head, row in enumerate(calibrated.accuracies, start=1)
            ),
            "",
            f"Tokens a step expected of the tree in `{CALIBRATION_FILE}`, by nodes: {promised}.",
        ]
    )


def _settings(recipe: Recipe) -> str:
    shown = [
        f"learning rate {recipe.learning_rate:g} (heads {recipe.head_learning_rate:g})",
        f"{recipe.max_steps} steps" if recipe.max_steps else f"{recipe.epochs} epochs",
        f"{recipe.batch_tokens} tokens a batch",
        f"decay {recipe.decay:g}, seed {recipe.seed}",
    ]
    if recipe.method == "medusa-2":
        shown.append(f"LoRA {recipe.lora_rank}, lambda0 {recipe.lambda0:g}")
    return ", ".join(shown)
