"""The parts of gpu.py about GGUF files: products and steps of a 7B whose weights are blocks of
Q4_K, the LM head of Q6_K. The blocks are random, without a file: as many bytes, of the same types,
as a Q4_K_M file without its larger tensors. `llama-bench` beside it: assets/benchmarks/NOTES.md."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu_clock import cold
from gpu_part import Bench
from gpu_steps import figures, shape_of
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from medusa_chat.bench.random_model import RandomModel, llama_config, random_heads
from medusa_chat.checkpoints.prepare import prepare
from medusa_chat.decoding.backends import stored_linear
from medusa_chat.decoding.backends.block_tiles import KINDS, BlockTiles
from medusa_chat.decoding.backends.kernels import blocks
from medusa_chat.decoding.backends.stored_linear import (
    StoredEmbedding,
    StoredLinear,
    random_rows,
    unpacked_product,
)
from medusa_chat.decoding.engine import Engine

NAMES = {kind.name: type for type, kind in KINDS.items()}
ROOM = 128  # tokens behind the longest text
ROWS = (1, 8, 16, 32, 64)
NODES = (1, 8, 16, 32, 64)
LINEARS = {"qkv": (12288, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)}
TINY = {"qkv": (96, 256), "down": (64, 512)}
SAMPLE = 256  # outputs that are made at random; a weight is these again and again


def parity(bench: Bench) -> Iterator[tuple[str, Any]]:
    """The kernel's largest difference from torch on random blocks of each type, in bf16 and fp16;
    on a CPU, which has none, the twin's own name."""
    device = torch.device(bench.device)
    for type, kind in KINDS.items():
        for dtype in (torch.bfloat16, torch.float16):
            name = f"{kind.name}, {str(dtype).removeprefix('torch.')}"
            yield name, "dry" if bench.is_dry else stored_linear.difference(device, dtype, type)


def product_times(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Milliseconds of one product, by type, linear and rows: by our kernel and by torch, which
    unpacks; and the GB that the kernel reads."""
    device, timer = torch.device(bench.device), partial(cold, bench.device)
    for kind in bench.either(("Q4_K", "Q6_K", "Q5_K", "Q8_0", "IQ4_XS", "MXFP4"), ("Q4_K",)):
        for name, (outs, ins) in bench.either(LINEARS, TINY).items():
            weight = random_tiles(NAMES[kind], outs, ins, device)
            for rows in ROWS:
                x = torch.randn(rows, ins, device=device).bfloat16()
                out = torch.empty(rows, outs, device=device, dtype=x.dtype)
                found = {"GB": weight.data.numel() / 1e9}
                if not bench.is_dry:
                    found["ours"] = timer(partial(blocks.run, weight, x, out))
                if rows in (1, 64):
                    found["unpacked"] = timer(partial(unpacked_product, weight, x, out))
                yield f"{kind} {name}, {rows} rows", found


def steps(bench: Bench, lengths: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """Steps of the 7B shape in blocks, in bf16, as a load prepares it."""
    shape = shape_of(bench, "7b", max(lengths) + ROOM)
    device = torch.device(bench.device)
    model = random_model(shape, device, torch.bfloat16)
    heads = random_heads(shape, device, torch.bfloat16)
    yield "bytes of blocks", sum(b.nbytes for n, b in model.named_buffers() if "part" in n)
    backend, notes = prepare(model, heads, device, shape.context)
    yield "notes", list(notes)
    yield from figures(bench, Engine(backend, heads), lengths, NODES)


def random_model(shape: RandomModel, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama of a shape with random blocks, as a load of a GGUF file leaves it: Q4_K, where rows
    are no whole blocks of it Q4_0, and the LM head Q6_K or Q8_0."""
    config = llama_config(shape)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    head = model.get_output_embeddings()
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear):
            outs, ins = linear.weight.shape
            kinds = ("Q6_K", "Q8_0") if linear is head else ("Q4_K", "Q4_0")
            type = NAMES[kinds[ins % 256 > 0]]
            tiles = random_tiles(type, outs, ins, device)
            model.set_submodule(name, StoredLinear([tiles], None, dtype))
    words, size = model.get_input_embeddings().weight.shape
    type = NAMES["Q4_0" if size % 256 else "Q4_K"]
    table = random_tiles(type, words, size, device)
    model.set_input_embeddings(StoredEmbedding(table, dtype))
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            whole = torch.ones(weight.shape, device=device, dtype=dtype)  # norms
            setattr(module, name, nn.Parameter(whole, requires_grad=False))
    model.model.rotary_emb = type_of(model.model.rotary_emb)(config).to(device)
    return model.eval()


def type_of(module: Any) -> Any:
    return module.__class__


def random_tiles(type: int, outs: int, ins: int, device: torch.device) -> BlockTiles:
    """A weight of SAMPLE random outputs again and again, its numbers about as small as a model's:
    a step reads every byte of it all the same."""
    generator = torch.Generator().manual_seed(0)
    sample = random_rows(type, min(SAMPLE, outs), ins, generator)
    strips = BlockTiles.of(type, sample, ins).data.to(device)
    whole: Tensor = strips.repeat(-(-outs // SAMPLE), 1)[: -(-outs // 16)].contiguous()
    return BlockTiles(type, whole, outs, ins)
