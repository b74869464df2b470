"""LoRA adapters: read by an allow-list of their config, merged into the backbone through peft."""

import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.layouts.lora import CONFIG, lora_values
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.layouts.text_part import name_of
from medusa_chat.errors import ModelError, first_line

WRAPPED = "base_model.model."  # before the names of what peft wraps


def merge_adapter(model: Any, file: Path) -> Any:
    """The backbone with the adapter's changes in its weights. Raises ModelError when the adapter
    is of another kind or made for another backbone."""
    from peft import LoraConfig, set_peft_model_state_dict

    values = lora_values(LocalFolder(file.parent), CONFIG)
    tensors = {_name_of(name): tensor for name, tensor in _read_tensors(file).items()}
    try:
        config = LoraConfig(task_type="CAUSAL_LM", inference_mode=True, **values)
        wrapped = wrapped_by_peft(model, config)
        report = set_peft_model_state_dict(wrapped, tensors)
        left = [*report.unexpected_keys, *(k for k in report.missing_keys if "lora_" in k)]
        if left:
            raise ModelError(f"{file} does not fit this backbone ({left[0]}): use its own")
        return wrapped.merge_and_unload(safe_merge=True).eval().requires_grad_(False)
    except ModelError:
        raise
    except Exception as error:  # peft raises all kinds for adapters that do not fit
        raise ModelError(f"{file} cannot be merged: {first_line(error)}") from error


def wrapped_by_peft(model: Any, config: Any) -> Any:
    """The model with a new adapter of a LoraConfig."""
    from peft import get_peft_model

    with warnings.catch_warnings():  # peft asks transformers by a name that is going away
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(model, config)


def _name_of(tensor: str) -> str:
    """A tensor of an adapter of a whole vision-language model, as in one of its text part."""
    inner = tensor.removeprefix(WRAPPED)
    return tensor if inner == tensor else WRAPPED + name_of(inner)


def _read_tensors(file: Path) -> Any:
    path = file
    if file.suffix != ".safetensors":
        path = pickle_sandbox.convert([file], finite=True) / pickle_sandbox.target_names([file])[0]
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {first_line(error)}") from error
