"""The LoRA adapter of Medusa-2, on every linear layer of the backbone."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from medusa_chat.checkpoints.adapters import wrapped_by_peft
from medusa_chat.training.recipe import Recipe


def add_adapter(model: Any, recipe: Recipe) -> tuple[Any, tuple[str, ...]]:
    """The model, frozen, wrapped by peft with a new LoRA on every linear layer and the LM head; and
    the names of these layers. An LM head that is tied to the embeddings has none: it would change
    the embeddings as well."""
    from peft import LoraConfig

    names = linear_names(model)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=list(names),
    )
    torch.manual_seed(recipe.seed)
    return wrapped_by_peft(model.requires_grad_(False), config), names


def linear_names(model: Any) -> tuple[str, ...]:
    """Last parts of the names of the decoder's linear layers, and of an LM head that is not tied to
    the embeddings."""
    names = {
        name.rpartition(".")[2]
        for name, part in model.get_decoder().named_modules()
        if isinstance(part, (nn.Linear, Conv1D))
    }
    head = model.get_output_embeddings()
    if not is_tied(model):
        names |= {n.rpartition(".")[2] for n, part in model.named_modules() if part is head}
    return tuple(sorted(names))


def adapter_size(model: Any, rank: int) -> int:
    """Parameters of an adapter of this rank; the model's own weights may be packed."""
    names, size = linear_names(model), 0
    for name, part in model.named_modules():
        if name.rpartition(".")[2] in names:
            is_linear = isinstance(part, nn.Linear)
            size += sum((part.in_features, part.out_features) if is_linear else part.weight.shape)
    return rank * size


def is_tied(model: Any) -> bool:
    """Whether the LM head and the embeddings are one tensor."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def set_dropout(model: Any, is_on: bool) -> None:
    """Switch the adapter's dropout until the next call; the backbone's own is always off."""
    model.eval()
    for name, part in model.named_modules():
        if name.endswith("lora_dropout"):
            part.train(is_on)


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapter's weights on the CPU in the dtype they were trained in (float32 over a backbone
    of half precision), by peft's names: of each linear [out, in] `...lora_A.weight` [r, in] and
    `...lora_B.weight` [out, r]."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def load_adapter(model: Any, tensors: dict[str, Tensor]) -> None:
    """Put the tensors of adapter_tensors into the adapter."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, tensors)
