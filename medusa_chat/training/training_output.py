"""The output of a training: heads, heads with an adapter, or a whole model, as a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from medusa_chat.checkpoints import weights
from medusa_chat.checkpoints.adapters import merge_adapter
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.checkpoint_writer import (
    Calibrated,
    heads_config,
    write_adapter,
    write_checkpoint,
    write_heads,
    write_json,
)
from medusa_chat.training.model_card import model_card
from medusa_chat.training.recipe import TrainRequest
from medusa_chat.training.setup import TrainingSetup


@dataclass(frozen=True)
class Adapter:
    """A trained LoRA adapter: its tensors, as `adapter_tensors` gives them, and the names of the
    layers it is on. Without tensors there is none."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    layers: Sequence[str] = ()


def write_output(
    request: TrainRequest,
    setup: TrainingSetup,
    heads: MedusaHeads,
    calibrated: Calibrated,
    adapter: Adapter,
) -> int:
    """Write the checkpoint. The heads, [layers, K, d, d] with biases [layers, K, d], are written in
    the backbone's dtype; the adapter's tensors in their own, or merged into the backbone's weights.
    Returns its bytes. Raises MedusaChatError."""
    recipe, base = request.recipe, setup.base.seen_from(request.output)
    heads = heads.to(setup.model.dtype).requires_grad_(False)
    is_merged = recipe.method == "medusa-2" and recipe.output == "merged"
    if is_merged:
        setup.model = None  # frees the memory for the model that the adapter is merged into

    def fill(folder: Path) -> None:
        if is_merged:
            _write_merged(request, setup, folder, adapter, base)
        else:
            write_json(folder / "config.json", heads_config(heads, base))
            if adapter.tensors:
                write_adapter(folder, adapter.tensors, adapter.layers, recipe, base)
        write_heads(folder, heads, calibrated)
        card = model_card(setup.base, recipe, [path.name for path in request.data], calibrated)
        (folder / "README.md").write_text(card, "utf-8")

    return write_checkpoint(request.output, fill)


def _write_merged(
    request: TrainRequest, setup: TrainingSetup, folder: Path, adapter: Adapter, base: str
) -> None:
    """Write the whole model. The adapter is merged into the published weights in 16 bits, also
    where it was trained over quantised ones."""
    file = write_adapter(folder, adapter.tensors, adapter.layers, request.recipe, base)
    precision = "bf16" if setup.precision in ("nf4", "int8") else setup.precision
    model = weights.read_model(setup.found, setup.config, precision, torch.device("cpu"))
    merge_adapter(model, file).save_pretrained(folder)
    setup.tokenizer.save_pretrained(folder)
    file.unlink()
    file.with_name("adapter_config.json").unlink()
