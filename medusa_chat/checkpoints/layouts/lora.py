"""LoRA: what a merge needs of an adapter's config, by an allow-list."""

from collections.abc import Mapping
from typing import Any

from medusa_chat.checkpoints.layouts.source import Source, read_json
from medusa_chat.errors import ModelError, first_line

CONFIG = "adapter_config.json"
MAX_RANK = 4096
# what changes the result of a merge; anything else in the file belongs to its training
NUMBERS = ("r", "lora_alpha")
FLAGS = ("fan_in_fan_out", "use_rslora", "use_dora")
PATTERNS = ("rank_pattern", "alpha_pattern")


def lora_values(source: Source, path: str) -> dict[str, Any]:
    """The settings of the adapter whose config lies at `path`, as far as its merge needs them.
    Raises ModelError for anything that is no plain LoRA."""
    file = f"{source.name}/{path}"
    try:
        found = read_json(source, path)
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


def _refuse_odd(values: Mapping[str, Any], file: str) -> None:
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
