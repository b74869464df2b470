"""A model of transformers filled from a GGUF file: made without memory, then tensor by tensor.

The weights of linears and experts stay empty (meta) where our C code will multiply them: they are
read where they are packed (weight_storage.FileRows), so that nothing lies in memory twice.
"""

import re
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.backends.native_experts import experts_of
from medusa_chat.decoding.layer_forms import DOWNS, GATES_UPS, own_table
from medusa_chat.errors import ModelError, first_line


def gguf_model(
    found: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    is_packed: bool = False,
) -> Any:
    """The model in a GGUF file, its numbers in `dtype` on a device. is_packed: whether the weights
    of its linears, and on a CPU of its experts, stay empty. Raises ModelError."""
    weights = GgufWeights.of(found)
    model = empty_gguf_model(found, config, dtype)
    weights.refuse_unlike(model)
    wide = _kept_wide(model, dtype)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    linears = {f"{name}.weight" for name, m in model.named_modules() if type(m) is nn.Linear}
    stacks = {f"{name}.{key}" for name, _ in experts_of(model) for key in (GATES_UPS, DOWNS)}
    table = f"{_name_of(model, embeddings)}.weight"
    if device.type != "cpu" or weights.stored_type(table) is not None:  # it stays packed, too
        linears.add(table)
    if device.type == "cpu" and (own := own_table(model)) is not None:
        place = f"{_name_of(model, own)}.weight"
        linears |= {place} if weights.stored_type(place) is not None else set()
    if device.type != "cpu":  # where experts do not
        stacks = set()
    for place in weights.shapes:
        is_wide = wide is not None and wide.search(place)
        if is_packed and not is_wide and place in linears and weights.is_matrix(place):
            continue
        if is_packed and place in stacks:
            continue
        values = weights.floats(place, torch.float32 if is_wide else dtype)
        _put(model, place, values.to(device))
    if f"{_name_of(model, head)}.weight" not in weights.shapes:
        head.weight = embeddings.weight
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model


def empty_gguf_model(found: Checkpoint, config: Any, dtype: torch.dtype) -> Any:
    """The model without its parameters' values; buffers have theirs. Raises ModelError for a config
    of which none can be made."""
    try:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=dtype
            )
    except Exception as error:  # transformers raises all kinds for odd numbers
        raise ModelError(
            f"the config in {found.source} cannot be read: {first_line(error)}"
        ) from error


def read_gguf_lm_head(found: Checkpoint, config: Any) -> LogitHead:
    """The LM head of a GGUF file on the CPU, its weight [V, d] in bf16. Raises ModelError."""
    weights, model = GgufWeights.of(found), empty_gguf_model(found, config, torch.bfloat16)
    linear = model.get_output_embeddings()
    own = f"{_name_of(model, linear)}.weight"
    table = f"{_name_of(model, model.get_input_embeddings())}.weight"
    weight = weights.floats(own if own in weights.shapes else table, torch.bfloat16)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        bias = weights.floats(f"{own.removesuffix('weight')}bias", torch.bfloat16)
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return LogitHead(linear, config.get_text_config())


def _kept_wide(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """The names of what a family keeps in fp32 whatever the dtype, as transformers does."""
    names = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    names |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    if not names:
        return None
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in sorted(names)))


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, one in model.named_modules() if one is module)


def _put(model: nn.Module, place: str, values: Tensor) -> None:
    """Give the parameter or buffer of this name its values."""
    owner, _, name = place.rpartition(".")
    module = model.get_submodule(owner)
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(values, requires_grad=False)
    else:
        module._buffers[name] = values
