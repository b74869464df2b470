"""The parts of gpu.py about 4-bit weights: our kernel, merged projections, and their parity.

Everything but the timing of our kernel also runs on a CPU, where a test runs it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from medusa_chat.bench.harness.random_model import RandomModel, llama_config
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import nf4
from medusa_chat.decoding.backends.torch_step import TorchStep
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.fused_layers import replace_submodules
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.linear4 import hold
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT

Timer = Callable[[Callable[[], Any]], float]
PROMPT = [(7 * i + 3) % 64 for i in range(40)]
ROWS = (1, 8, 16, 32, 64)
# outputs, inputs of a 7B layer's linears, those that are merged alone and as one
LINEARS = {
    "q": (4096, 4096),
    "qkv": (12288, 4096),
    "gate": (11008, 4096),
    "gate_up": (22016, 4096),
    "down": (4096, 11008),
}


def random_linear(outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A 4-bit linear of random weights, doubly quantised as a loaded one."""
    made = bnb.nn.Linear4bit(
        inputs, outputs, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype) * 0.02
    packed = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    made.weight = packed.to(device)
    hold(made)  # a CPU would lay it out anew
    return made.eval()


def random_engine(shape: RandomModel, device: torch.device, dtype: torch.dtype) -> Engine:
    """A Llama of a shape with 4-bit layers as they are loaded, and heads; all random."""
    config = llama_config(shape)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    torch.manual_seed(0)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    sizes = linear.out_features, linear.in_features
                    setattr(parent, name, random_linear(*sizes, device, dtype))
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.device.type == "meta":
                filled = torch.empty(weight.shape, device=device, dtype=dtype)
                filled = filled.fill_(1) if weight.dim() == 1 else filled.normal_(std=0.02)
                setattr(module, name, nn.Parameter(filled, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    heads = MedusaHeads(shape.heads, shape.hidden, dtype=dtype).to(device).requires_grad_(False)
    nn.init.normal_(heads.weight, std=0.02)
    return engine_of(model.eval(), heads)


def engine_of(model: Any, heads: MedusaHeads) -> Engine:
    context = min(2048, model.config.max_position_embeddings)
    return Engine(TorchStep(Backbone(model, context)), heads)


def merged_engine(engine: Engine) -> Engine:
    """The same model with merged projections; the one given is used up."""
    model, heads = engine.backbone.model, engine.heads
    assert heads is not None
    replace_submodules(model)
    return engine_of(model, heads)


def kernel_parity(device: torch.device) -> dict[str, Any]:
    """Largest difference of our kernel from its twin in fp32, as a share of the largest output."""
    formats = (torch.float16, torch.bfloat16, torch.float32)
    return {str(f): nf4.difference(device, f) for f in formats}


def merged_parity(
    shape: RandomModel, device: torch.device, dtype: torch.dtype, count: int = 100
) -> dict[str, Any]:
    """First place at which tokens differ from those of the model as it was loaded, None for
    nowhere: merged and plain, merged and Medusa. A difference in half precision is a near tie."""
    engine = random_engine(shape, device, dtype)
    loaded = tokens(engine, count)
    merged = merged_engine(engine)
    plain = tokens(merged, count)
    return {
        "merged against loaded": first_difference(plain, loaded),
        "merged, Medusa against plain": first_difference(tokens(merged, count, "medusa"), plain),
        "check of a tree step": merged.backbone.check(),
    }


def tokens(engine: Engine, count: int, drafter: str = "none") -> list[int]:
    """Greedy, of an answer to PROMPT."""
    from medusa_chat.trees.auto_tree import source_tree

    settings = GenerationSettings(drafter=drafter, max_new_tokens=count, seed=0, nodes=16)
    tree = ROOT if drafter == "none" else source_tree(None, len(engine.heads or ())).head(16)
    engine.forget()
    *_, last = engine.generate(PROMPT, engine.drafter(settings, tree), settings)
    return list(last.token_ids)


def first_difference(ours: list[int], others: list[int]) -> int | None:
    pairs = enumerate(zip(ours, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), None)


def product_times(timer: Timer, device: torch.device, linears: Any = None) -> dict[str, Any]:
    """Milliseconds of one product, by linear and rows: bitsandbytes, fp16 weights and, where it
    runs, our kernel, with its largest difference from bitsandbytes."""
    found: dict[str, Any] = {}
    is_there = nf4.has_kernel(device)
    for name, (outputs, inputs) in (linears or LINEARS).items():
        linear = random_linear(outputs, inputs, device, torch.float16)
        own = nf4.Nf4Linear(linear, frozenset(nf4.BUCKETS))
        dense = torch.randn(outputs, inputs, device=device, dtype=torch.float16)
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=device, dtype=torch.float16)
            row = {
                "bitsandbytes": timer(partial(linear, x)),
                "fp16": timer(partial(F.linear, x, dense)),
            }
            if is_there:
                row |= {"ours": timer(partial(own.own, x)), "off by": off(own.own(x), linear(x))}
            found[f"{name} {outputs} x {inputs}, {rows} rows"] = row
    return found


def off(ours: Tensor, others: Tensor) -> float:
    return float((ours.float() - others.float()).abs().max() / others.float().abs().max())


def settings_times(timer: Timer, device: torch.device) -> dict[str, Any]:
    """Milliseconds of our kernel by how it decodes, how many programs it fills and its stages."""
    from medusa_chat.decoding.backends.kernels.nf4 import run

    found = {}
    for name in ("q", "gate_up"):
        tiles = nf4.tiles_of(random_linear(*LINEARS[name], device, torch.float16))
        for rows in (16, 64):
            x = torch.randn(rows, tiles.inputs, device=device, dtype=torch.float16)
            for use_prmt, programs, stages in (
                *((False, 264, 4), (True, 132, 4), (True, 264, 3), (True, 264, 4)),
                *((True, 264, 5), (True, 528, 4), (True, 1056, 4)),
            ):
                call = partial(run, tiles, x, use_prmt, programs, stages)
                words = f"{'prmt' if use_prmt else 'table'}, {programs} programs, {stages} stages"
                found[f"{name}, {rows} rows, {words}"] = timer(call)
    return found


def step_times(
    shape: RandomModel,
    device: torch.device,
    timer: Timer,
    times: Callable[[Engine], dict[str, Any]],
) -> dict[str, Any]:
    """`times` of the model as it was loaded, merged, and with our kernel where it is faster."""
    found: dict[str, Any] = {}
    engine = random_engine(shape, device, torch.float16)
    found["as loaded"] = times(engine)
    engine = merged_engine(engine)
    found["merged"] = times(engine)
    found["our kernel"] = nf4.replace_where_faster(engine.backbone.model, timer)
    if any(isinstance(module, nf4.Nf4Linear) for module in engine.backbone.model.modules()):
        found["merged, our kernel"] = times(engine)
    return found
