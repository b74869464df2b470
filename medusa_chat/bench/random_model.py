"""RandomModel: a model with the sizes of a published one and random weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_chat.bench.hf_baseline import DTYPES
from medusa_chat.checkpoints.devices import (
    choose_device,
    choose_precision,
    held_bytes,
    refuse_out_of_memory,
)
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.prepare import is_native, prepare
from medusa_chat.checkpoints.usual_nodes import usual_nodes
from medusa_chat.checkpoints.weight_storage import rounding
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest, ModelInfo
from medusa_chat.trees.auto_tree import auto_tree, expected_tokens

CONTEXT = 8192


@dataclass(frozen=True)
class RandomModel:
    """The sizes of a Llama. heads: Medusa heads of one layer. own_lm: each has an LM head of its
    own, as published heads have; else they share the backbone's."""

    name: str
    hidden: int
    inner: int
    layers: int
    attention: int
    key_values: int
    vocabulary: int
    context: int
    heads: int = 5
    own_lm: bool = False


SHAPES = {
    "7b": RandomModel("7b", 4096, 11008, 32, 32, 32, 32000, 4096),
    "8b": RandomModel("8b", 4096, 14336, 32, 32, 8, 128256, 131072),
}


def load_shape(shape: RandomModel, request: LoadRequest) -> LoadedModel:
    """A model of random weights, never zeros, on the device and in the precision of the request.

    It has no tokenizer. Raises UsageError for what bitsandbytes quantises, DeviceError,
    OutOfMemoryError.
    """
    device = choose_device(request.device)
    precision, reason = choose_precision(request.precision, device)
    keep = rounding(precision, str(device))
    if precision not in DTYPES and keep.dtype is None:
        raise UsageError(
            f"precision is {precision!r}: --shape takes fp32, bf16 or fp16, and on a CPU with a C "
            "compiler int8 and nf4"
        )
    dtype = keep.dtype or getattr(torch, DTYPES[precision])
    name = f"shape {shape.name}, {shape.layers} layers, random weights"
    with refuse_out_of_memory(
        lambda: f"{name} does not fit on {device} at {precision}: give fewer --layers"
    ):
        model, heads = random_weights(shape, device, dtype)
        parameters = sum(p.numel() for p in model.parameters())
        context = min(request.max_context or CONTEXT, shape.context)
        backend, notes = prepare(model, heads, device, context, keep=keep)
    usual = usual_nodes(
        device,
        precision,
        is_native(backend),
        model.config.to_dict(),
        expected_tokens(None, shape.heads),
        sum(p.numel() for p in heads.parameters()),
    )
    backbone = backend.backbone
    tree, why = auto_tree(None, shape.heads, device, usual)
    info = ModelInfo(
        name=name,
        family="llama",
        precision=precision,
        device=str(device),
        parameters=parameters,
        heads=shape.heads,
        context=context,
        tree="auto",
        nodes=len(tree),
        tree_reason=why,
        memory_bytes=held_bytes(model, *backbone.beside, heads) + backbone.cache.nbytes,
        notes=(reason, *notes),
    )
    texts: Any = None  # no token is ever turned into text
    return LoadedModel(Engine(backend, heads), None, texts, None, info, usual)


def llama_config(shape: RandomModel, **others: Any) -> LlamaConfig:
    """The configuration of a Llama of these sizes. others: its other fields."""
    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.attention,
        num_key_value_heads=shape.key_values,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
        **{"tie_word_embeddings": False, **others},
    )


def random_weights(
    shape: RandomModel, device: torch.device, dtype: torch.dtype
) -> tuple[Any, MedusaHeads]:
    """The model and its heads, made on the device without a copy in main memory."""
    with torch.device("meta"):
        empty: Any = LlamaForCausalLM(llama_config(shape))
    model = empty.to(dtype).to_empty(device=device).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    _fill(model.named_parameters())
    return model, random_heads(shape, device, dtype)


def random_heads(shape: RandomModel, device: torch.device, dtype: torch.dtype) -> MedusaHeads:
    """Random Medusa heads for a random model, on its device."""
    vocabulary = shape.vocabulary if shape.own_lm else None
    with torch.device(device):
        heads = MedusaHeads(shape.heads, shape.hidden, vocabulary=vocabulary, dtype=dtype)
    _fill(heads.named_parameters())
    return heads


@torch.no_grad()
def _fill(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Small random numbers; norms are 1, so that hidden states keep their magnitude."""
    for name, parameter in parameters:
        parameter.requires_grad_(False)
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(std=0.02)
