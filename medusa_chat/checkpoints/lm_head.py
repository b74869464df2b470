"""The backbone's LM head alone, read from the model's files without the rest where it can be."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.weights import read_model, weight_files
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.errors import ModelError, first_line


def read_lm_head(found: Checkpoint, config: Any) -> LogitHead:
    """The LM head of a backbone on the CPU, its weight [V, d] in the dtype of the file. A family
    whose files name it otherwise than the model is read whole, in bf16. Raises ModelError."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    owner = embeddings if linear.weight is embeddings.weight else linear
    name = next(name for name, module in model.named_modules() if module is owner)
    own = next(name for name, module in model.named_modules() if module is linear)
    weight = _read(found, f"{own}.weight")  # files may have one that their config calls tied
    weight = _read(found, f"{name}.weight") if weight is None else weight
    if weight is None or getattr(linear, "bias", None) is not None:
        linear = read_model(found, config, "bf16", torch.device("cpu")).get_output_embeddings()
    elif weight.shape != linear.weight.shape or not weight.is_floating_point():
        raise ModelError(
            f"{found.backbone}: the LM head is {tuple(weight.shape)} in {weight.dtype}, not "
            f"{tuple(linear.weight.shape)} in 16 or 32 bits: give one that is not quantised"
        )
    else:
        linear.weight = nn.Parameter(weight, requires_grad=False)
    return LogitHead(linear, config.get_text_config())


def _read(found: Checkpoint, name: str) -> Tensor | None:
    """The tensor of this name, whatever stands before its last two parts, for files have more than
    one prefix; None where it is not just one."""
    ending = ".".join(name.split(".")[-2:])
    places: list[tuple[Path, str]] = []
    try:
        for file in weight_files(found):
            with safe_open(file, framework="pt") as opened:
                places += [(file, n) for n in opened.keys() if f".{n}".endswith(f".{ending}")]
        if len(places) != 1:
            return None
        with safe_open(places[0][0], framework="pt") as opened:
            weight: Tensor = opened.get_tensor(places[0][1])
            return weight
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{found.backbone} cannot be read: {first_line(error)}") from error
