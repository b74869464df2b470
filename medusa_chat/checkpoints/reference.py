"""Reference: what a model's own code makes of a text in fp32, by transformers' eager attention.

The weights are those that the loaded model holds, of 16, 8 or 4 bits, and those of one module at a
time are widened to fp32: the whole model in fp32 would not fit beside itself.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.native_weights import NativeLinear
from medusa_chat.decoding.backends.quantised import Int8Linear, Nf4Linear, is_linear4
from medusa_chat.decoding.backends.replacements import PackedLinear
from medusa_chat.decoding.kv_cache import refused

SOME = 2**20  # numbers of a linear's weight that are widened together, a few MB of fp32


def can_be_widened(backbone: Backbone) -> bool:
    """Whether all weights are in memory: those on the disk come module by module, as they are."""
    return not any(parameter.is_meta for parameter in backbone.model.parameters())


@torch.no_grad()
def reference_logits(backbone: Backbone, tokens: Tensor) -> Tensor:
    """The model's own logits float32 [t, V] of a causal pass over tokens int64 [t]. Raises
    ModelError for a family whose code fails in it."""
    model = backbone.model
    with ExitStack() as stack:
        stack.enter_context(refused(backbone.config, "its pass in fp32 fails"))
        stack.callback(model.set_attn_implementation, backbone.implementation)
        model.set_attn_implementation("eager")
        for module in model.modules():
            stack.enter_context(_widened(module))
        logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


@contextmanager
def _widened(module: nn.Module) -> Iterator[None]:
    """Let a module compute in fp32 with what weights it holds itself."""
    forward, own = module.forward, module.__dict__.get("forward")  # accelerate's, where it has one
    if isinstance(module, nn.Linear | NativeLinear | PackedLinear | Int8Linear | Nf4Linear):
        module.forward = _Widened(module)
    elif isinstance(module, nn.Embedding):  # a large table, of which some rows are read
        module.forward = lambda *given, **named: forward(*given, **named).float()
    elif any(True for _ in module.parameters(recurse=False)):

        def in_fp32(*given: Any, **named: Any) -> Any:
            held = [(p, p.data) for p in module.parameters(recurse=False)]
            try:
                for parameter, data in held:
                    parameter.data = data.float()
                return forward(*given, **named)
            finally:
                for parameter, data in held:
                    parameter.data = data

        module.forward = in_fp32
    else:
        yield
        return
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _Widened:
    """A linear of any kind, [..., K] -> float32 [..., N]. The last product is kept: the parts of a
    merged linear (Outputs) ask for it one after the other."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, self._product(x)
        return self._last[1]

    def _product(self, x: Tensor) -> Tensor:
        linear = self._linear
        parts = [F.linear(x.to(w.device, torch.float32), w) for w in _weights(linear)]
        found = torch.cat(parts, -1)
        return found if linear.bias is None else found + linear.bias.float()


def _weights(linear: Any) -> Iterator[Tensor]:
    """The weight that a linear multiplies, some outputs at a time: float32 [n, K]."""
    if isinstance(linear, NativeLinear):
        yield from linear.weight_parts()
    elif isinstance(linear, Int8Linear):
        yield from _of_bytes(linear.codes, linear.scales)
    elif isinstance(linear, Nf4Linear):
        yield _of_4_bits(linear.stock)
    elif is_linear4(linear):
        yield _of_4_bits(linear)
    elif type(linear).__name__ == "Linear8bitLt":
        held = linear.weight if linear.weight.SCB is not None else linear.state
        codes = held.CB if held.CB is not None else linear.weight.data
        yield from _of_bytes(codes, held.SCB)
    else:
        for rows in linear.weight.split(max(1, SOME // linear.weight.shape[1])):
            yield rows.float()


def _of_bytes(codes: Tensor, scales: Tensor) -> Iterator[Tensor]:
    """Weights that bitsandbytes rounded to 8 bits."""
    rows = max(1, SOME // codes.shape[1])
    for some, scale in zip(codes.split(rows), scales.split(rows), strict=True):
        yield some * (scale.float()[:, None] / 127)


def _of_4_bits(linear: Any) -> Tensor:
    """Weights that bitsandbytes rounded to 4 bits, as it decodes them."""
    from bitsandbytes.functional import dequantize_4bit

    state = linear.weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        return _of_cpu_layout(linear.weight.data, state)
    found: Tensor = dequantize_4bit(linear.weight.data, state)
    return found.float()


def _of_cpu_layout(packed: Tensor, state: Any) -> Tensor:
    """The same of what bitsandbytes laid out for bf16 vectors of a CPU: of 32 outputs two inputs
    side by side, the first half of these numbers in the low bits of 32 bytes. Its own way back
    rounds the scales anew."""
    outs, ins = state.shape
    bytes_of = packed.view(torch.uint8).view(-1, 32)
    numbers = torch.cat([bytes_of & 15, bytes_of >> 4], 1).view(-1, ins // 2, 32, 2)
    codes = state.code[numbers.transpose(1, 2).reshape(outs, ins).int()]
    return codes.float() * state.absmax.float().t().repeat_interleave(state.blocksize, 1)
