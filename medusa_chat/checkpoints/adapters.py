"""LoRA adapters: read by an allow-list of their config, merged into the backbone through peft."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.layouts.source import LocalFolder, read_json
from medusa_chat.errors import ModelError, first_line

MAX_RANK = 4096
# what changes the result of a merge; anything else in the file belongs to its training
NUMBERS = ("r", "lora_alpha")
FLAGS = ("fan_in_fan_out", "use_rslora", "use_dora")
PATTERNS = ("rank_pattern", "alpha_pattern")


def merge_adapter(model: Any, file: Path) -> Any:
    """The backbone with the adapter's changes in its weights. Raises ModelError when the adapter
    is of another kind or made for another backbone."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    values = lora_values(file.with_name("adapter_config.json"))
    tensors = _read_tensors(file)
    try:
        config = LoraConfig(task_type="CAUSAL_LM", inference_mode=True, **values)
        wrapped = get_peft_model(model, config)
        report = set_peft_model_state_dict(wrapped, tensors)
        left = [*report.unexpected_keys, *(k for k in report.missing_keys if "lora_" in k)]
        if left:
            raise ModelError(f"{file} does not fit this backbone ({left[0]}): use its own")
        return wrapped.merge_and_unload(safe_merge=True).eval().requires_grad_(False)
    except ModelError:
        raise
    except Exception as error:  # peft raises all kinds for adapters that do not fit
        raise ModelError(f"{file} cannot be merged: {first_line(error)}") from error


def lora_values(file: Path) -> dict[str, Any]:
    """The settings of an adapter that its merge needs. Raises ModelError for anything that is no
    plain LoRA."""
    try:
        found = read_json(LocalFolder(file.parent), file.name)
        kind = found["peft_type"]
    except KeyError as error:
        raise ModelError(
            f"{file} is not a valid adapter config ({first_line(error)}): fetch it again"
        ) from error
    if kind != "LORA" or found.get("bias", "none") != "none" or found.get("modules_to_save"):
        raise ModelError(
            f"{file} is not supported: give a plain LoRA adapter without bias or saved modules, "
            "or merge it"
        )
    values = {key: found[key] for key in NUMBERS if key in found}
    values |= {key: found[key] for key in FLAGS if found.get(key) is True}
    values |= {key: dict(found[key]) for key in PATTERNS if found.get(key)}
    values["target_modules"] = found.get("target_modules")
    _refuse_odd(values, file)
    return values


def _refuse_odd(values: Mapping[str, Any], file: Path) -> None:
    rank, modules = values.get("r"), values["target_modules"]
    is_rank = type(rank) is int and 1 <= rank <= MAX_RANK
    is_list = isinstance(modules, list) and all(_is_name(name) for name in modules)
    names = [name for key in PATTERNS for name in values.get(key, {})]
    if not is_rank or not (is_list or modules == "all-linear") or not all(map(_is_name, names)):
        raise ModelError(
            f"{file} is invalid: r must be 1 to {MAX_RANK} and target_modules a list of names"
        )


def _is_name(name: Any) -> bool:
    """A module's name; peft would take anything else for a pattern."""
    return isinstance(name, str) and name.replace(".", "_").isidentifier() and len(name) < 200


def _read_tensors(file: Path) -> Any:
    path = file
    if file.suffix != ".safetensors":
        path = pickle_sandbox.convert([file], finite=True) / pickle_sandbox.target_names([file])[0]
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {first_line(error)}") from error
