"""The parts of gpu.py about weights of 4 and 8 bits: merged layers, our product, and steps."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import bitsandbytes as bnb
import torch
from gpu_clock import cold
from gpu_kernels import SMALL, answer
from gpu_kernels import TINY as TINY_SMALL
from gpu_part import Bench
from gpu_steps import NODES, figures, shape_of
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from medusa_chat.bench.answers import parting
from medusa_chat.bench.random_model import RandomModel, llama_config, random_heads
from medusa_chat.checkpoints.prepare import prepare
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.quantised import (
    Nf4Linear,
    QuantisedLinear,
    has_kernel,
    hold,
    take_int8,
)
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.step import TorchStep

ROOM = 128  # tokens behind the longest text
ROWS = (1, 8, 16, 32, 64)
# outputs, inputs of a 7B layer's linears, those that are merged alone and as one
LINEARS = {
    "q": (4096, 4096),
    "qkv": (12288, 4096),
    "gate": (11008, 4096),
    "gate_up": (22016, 4096),
    "down": (4096, 11008),
}
TINY = {"q": (64, 128), "gate_up": (128, 64)}


def steps(bench: Bench, lengths: Sequence[int], bits: int = 4) -> Iterator[tuple[str, Any]]:
    """Steps of the 7B shape with 4-bit or 8-bit layers in fp16, merged as a load merges them."""
    shape = shape_of(bench, "7b", max(lengths) + ROOM)
    model, heads = random_model(shape, torch.device(bench.device), torch.float16, bits)
    backend, notes = prepare(model, heads, torch.device(bench.device), shape.context)
    yield "notes", list(notes)
    yield from figures(bench, Engine(backend, heads), lengths, NODES)


def random_linear(
    outputs: int, inputs: int, device: torch.device, dtype: torch.dtype, bits: int = 4
) -> Any:
    """A quantised linear of random weights, as a loaded one: in 4 bits doubly quantised."""
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype) * 0.02
    if bits == 8:
        whole = bnb.nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
        whole.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        return whole.to(device).eval()
    made = bnb.nn.Linear4bit(
        inputs, outputs, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    packed = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    made.weight = packed.to(device)
    hold(made)  # a CPU would lay it out anew
    return made.eval()


def random_model(
    shape: RandomModel, device: torch.device, dtype: torch.dtype, bits: int = 4
) -> tuple[Any, MedusaHeads]:
    """A Llama of a shape with quantised layers as they are loaded, and its heads; all random."""
    config = llama_config(shape)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    torch.manual_seed(0)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    sizes = linear.out_features, linear.in_features
                    setattr(parent, name, random_linear(*sizes, device, dtype, bits))
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.device.type == "meta":
                filled = torch.empty(weight.shape, device=device, dtype=dtype)
                filled = filled.fill_(1) if weight.dim() == 1 else filled.normal_(std=0.02)
                setattr(module, name, nn.Parameter(filled, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.eval(), random_heads(shape, device, dtype)


def engine_of(model: Any, heads: MedusaHeads) -> Engine:
    context = min(2048, model.config.max_position_embeddings)
    return Engine(TorchStep(Backbone(model, context)), heads)


def merged(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Merged layers against layers as they were loaded, in fp32 and fp16: the first place at which
    tokens differ, None for nowhere. A difference in half precision is a near tie."""
    shape, count = bench.either((SMALL, 100), (TINY_SMALL, 24))
    for name, dtype in {"fp32": torch.float32, "fp16": torch.float16}.items():
        model, heads = random_model(shape, torch.device(bench.device), dtype)
        loaded = answer(engine_of(model, heads), 1, 0.0, count)
        replace_submodules(model)
        engine = engine_of(model, heads)
        plain = answer(engine, 1, 0.0, count)
        found = {
            "merged against loaded": parting(plain, loaded),
            "merged, Medusa against plain": parting(answer(engine, 16, 0.0, count), plain),
            "check of a tree step": check_steps(engine.backbone),
        }
        yield name, found


def product_times(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Milliseconds of one product, by linear and rows: bitsandbytes in 4 and in 8 bits, fp16
    weights and, where it runs, our kernel, with its largest difference from bitsandbytes'."""
    device, timer = torch.device(bench.device), partial(cold, bench.device)
    for name, (outputs, inputs) in bench.either(LINEARS, TINY).items():
        dense = torch.randn(outputs, inputs, device=device, dtype=torch.float16)
        given = {
            bits: random_linear(outputs, inputs, device, torch.float16, bits) for bits in (4, 8)
        }
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=device, dtype=torch.float16)
            row = {"fp16": timer(partial(F.linear, x, dense))}
            for bits, linear in given.items():
                row[f"bitsandbytes, {bits} bits"] = timer(partial(linear, x))
                if has_kernel(device, torch.float16, bits):
                    own = ours(linear).own
                    row[f"ours, {bits} bits"] = timer(partial(own, x))
                    row[f"off by, {bits} bits"] = off(own(x), linear(x))
            yield f"{name}, {rows} rows", row


def ours(linear: Any) -> QuantisedLinear:
    """The same linear, multiplied by our kernel."""
    if type(linear).__name__ == "Linear4bit":
        return Nf4Linear(linear)
    parent = nn.Sequential(linear)
    take_int8(parent)
    return parent[0]


def off(ours: Tensor, others: Tensor) -> float:
    return float((ours.float() - others.float()).abs().max() / others.float().abs().max())
