"""Unread tensors: of those in a model's files that nothing reads, which tell that it is wrong."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from medusa_chat.checkpoints.layouts.text_part import name_of
from medusa_chat.errors import ModelError

# what older versions of transformers stored of their own making, and scales of a cache in 8 bits
MADE = re.compile(r"(^|\.)(inv_freq|masked_bias|(attn|attention)\.bias|[kv]_scale|kv_scale)$")
DRAFTS = re.compile(r"nextn|mtp")  # keys of a config: layers behind the others that draft tokens
MAX_DRAFTS = 64


def refuse_unread(model: Any, names: Iterable[str], where: Path) -> None:
    """names: of tensors that nothing reads. Raises ModelError where one lies inside a module that
    the model has, as of a layer too many; other heads, vision parts and what drafts tokens lie
    beside, and of a quantised layer anything may be its method's."""
    drafts = range(
        count := model.config.get_text_config().num_hidden_layers, count + _drafts(model)
    )
    odd = [name for name in sorted(names) if _is_inside(model, name_of(name), drafts)]
    if not odd:
        return
    more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    raise ModelError(
        f"the weights in {where} hold {odd[0]}{more}, which a {model.config.model_type} model of "
        f"this config has no place for ({count} layers): its config.json is of another model, "
        "fetch both again"
    )


def _is_inside(model: Any, name: str, drafts: range) -> bool:
    base, prefix = model.base_model, model.base_model_prefix
    parts = name.removeprefix(f"{prefix}.").split(".")
    if MADE.search(name) or not parts[1:]:
        return False
    module = getattr(base, parts[0], None)
    if not isinstance(module, nn.Module):
        module = dict(model.named_children()).get(parts[0])
    if isinstance(module, nn.ModuleList) and parts[1].isdecimal():
        number = int(parts[1])
        if number in drafts:
            return False
        is_there = number < len(module)
        return not (is_there and getattr(model.config, "quantization_config", None))
    return module is not None and not getattr(model.config, "quantization_config", None)


def _drafts(model: Any) -> int:
    """How many layers behind the last draft tokens (multi-token prediction)."""
    values = model.config.get_text_config().to_dict().items()
    counts = [v for key, v in values if DRAFTS.search(key) and type(v) is int]
    return min(max(counts, default=0), MAX_DRAFTS)
