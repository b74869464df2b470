"""Tree check: compares a backbone's tree steps with its plain steps, and those with transformers.

The first comparison catches wrong masks and positions. Both sides are our code and round alike, so
it is sharp in 16 bits too, where transformers' eager attention is itself far off (Qwen2's large key
biases give scores in the hundreds, of which bf16 keeps eight bits). The second, against eager
attention in fp32, catches a wrong scale, norm or rotation. Its result is cached (known_checks.py),
so each model pays for it once. Its reference uses the weights
that the loaded model holds, in 16, 8 or 4 bits, and widens one module at a time to fp32: a second
copy of the whole model in fp32 would not fit in memory. Our linears round their input, and so does
the reference.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.checkpoints.known_checks import KnownChecks
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.native_layers import PackedEmbedding
from medusa_chat.decoding.backends.native_step import NativeDecoder
from medusa_chat.decoding.backends.native_weights import NativeLinear, quantised_bytes
from medusa_chat.decoding.backends.parity import largest, share
from medusa_chat.decoding.backends.quantised import Int8Linear, Nf4Linear, is_linear4
from medusa_chat.decoding.backends.replacements import PackedLinear
from medusa_chat.decoding.draft import TreeTensors
from medusa_chat.decoding.kv_cache import refused
from medusa_chat.decoding.probe import common_prefix
from medusa_chat.decoding.step import StepBackend
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ModelError

TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 0, 0), (1, 0)])
# The largest difference that rounding explains, as a share of the largest logit. Measured in 16
# bits on four models of 135M to 1.5B: 0.013 between our own steps where rows round differently,
# 0.07 or more where a node sees its sibling or a position is off by one; 0.04 from fp32, and 0.2 or
# more where a norm is off by 10 %. Where the C library rounds inputs to 8 bits, 0.027 to 0.083 on
# the same four, for the reference rounds inputs that differ in their last bits.
FP32_LIMIT = 1e-3
HALF_LIMIT, HALF_LIMIT_FROM_FP32, BYTE_LIMIT_FROM_FP32 = 0.05, 0.1, 0.15
WIDENED_AT_ONCE = 2**20  # numbers of a linear's weight, a few MB in fp32
LINEARS = (nn.Linear, NativeLinear, PackedLinear, Int8Linear, Nf4Linear)


def check_load(known: KnownChecks, backend: StepBackend) -> list[str]:
    """The results of both checks, a sentence each. Tree steps are checked at every load, plain
    steps once for each model and device. Raises ModelError."""
    backbone = backend.backbone
    difference = check_tree_step(backbone)
    agrees = "tree steps give the logits of plain steps bit for bit"
    if difference > 0:
        agrees = f"tree steps agree with plain steps (logits within {difference:.1g})"
        if backbone.dtype != torch.float32:
            agrees += "; texts can still differ at near ties"
    notes = [f"attention {backbone.implementation}; {agrees}"]
    if not can_be_widened(backbone):
        return [
            *notes,
            "plain steps were not compared with eager attention: some layers are on disk",
        ]
    what = f"{type(backend).__name__} by {backbone.implementation} in {backbone.dtype}"
    off_by = known.found(what)
    if off_by is None:
        off_by = check_plain_steps(backbone)
        notes += filter(None, [known.keep(what, off_by)])
    return [*notes, f"plain steps agree with eager attention in fp32 (logits within {off_by:.1g})"]


@torch.no_grad()
def check_tree_step(backbone: Backbone) -> float:
    """Compare each row of a tree step with plain steps along its path -> the largest difference of
    their logits, as a share of the largest logit. Raises ModelError where rounding does not explain
    it; the C pass must have no difference at all."""
    with _unrounded_activations(backbone.model), refused(backbone.config, "a tree step fails"):
        worst = _tree_difference(backbone)
    is_native = isinstance(backbone.decoder, NativeDecoder)
    limit = _limit(backbone, HALF_LIMIT_FROM_FP32 if backbone.has_experts else HALF_LIMIT)
    limit = 0.0 if is_native else limit
    if not worst <= limit:
        raise _refusal(backbone, "a tree step differs from plain steps", worst, limit)
    return worst


@torch.no_grad()
def check_plain_steps(backbone: Backbone) -> float:
    """Compare plain steps with transformers' code and eager attention in fp32, on the weights that
    are loaded -> the largest difference of their logits, as a share of the largest logit. Raises
    ModelError where rounding does not explain it. All weights must be in memory (can_be_widened).
    """
    text, nodes = _tokens(backbone)
    path = [nodes[node] for node in max(TREE.paths, key=len)]
    with _unrounded_activations(backbone.model), refused(backbone.config, "a plain step fails"):
        backbone.cache.crop(0)
        backbone.run_chunk(_ids(backbone, text))
        rows = list(_plain_rows(backbone, path))
        backbone.cache.crop(0)
    reference = reference_logits(backbone, _ids(backbone, text + path))[len(text) :]
    reference = reference.to(backbone.device)
    differences = [share(row[0], own) for row, own in zip(rows, reference, strict=True)]
    worst = largest(differences)
    if backbone.has_experts:  # near a tie a row is routed to another expert: take the median
        worst = float(torch.tensor(differences).median())
    is_packed = quantised_bytes(backbone.model) > 0
    limit = _limit(backbone, BYTE_LIMIT_FROM_FP32 if is_packed else HALF_LIMIT_FROM_FP32)
    if not worst <= limit:
        what = "a plain step differs from transformers' eager attention in fp32"
        raise _refusal(backbone, what, worst, limit)
    return worst


def check_steps(backbone: Backbone) -> float:
    """Both comparisons -> the larger difference. Raises ModelError."""
    return max(check_tree_step(backbone), check_plain_steps(backbone))


def _limit(backbone: Backbone, half: float) -> float:
    return FP32_LIMIT if backbone.dtype == torch.float32 else half


def _refusal(backbone: Backbone, what: str, worst: float, limit: float) -> ModelError:
    """The error: what was compared, by how much it differs, and what to try."""
    ways = [] if backbone.dtype == torch.float32 else ["--precision fp32"]
    if isinstance(backbone.decoder, NativeDecoder):
        ways.append("MEDUSA_CHAT_NATIVE=0, which is slower")
    remedy = f"try {' or '.join(ways)}" if ways else "choose another model"
    kind = "" if backbone.dtype == torch.float32 else f" in {str(backbone.dtype)[6:]}"
    return ModelError(
        f"model family {backbone.config.model_type} is not supported{kind}: {what} by "
        f"{worst:.2g} of the largest logit, more than {limit:g}: {remedy}"
    )


def _tokens(backbone: Backbone) -> tuple[list[int], list[int]]:
    """A text, and tokens for the nodes of TREE after it."""
    size = backbone.vocabulary
    text = [(7 * i + 3) % size for i in range(min(8, backbone.context - 4))]
    return text, [(11 * i + 5) % size for i in range(len(TREE))]


def _ids(backbone: Backbone, tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, device=backbone.device)


def _plain_rows(backbone: Backbone, tokens: Sequence[int]) -> Iterator[Tensor]:
    """The logits [1, V] of a plain step for each token; the cache keeps the tokens."""
    root = TreeTensors.of(ROOT, backbone.device)
    for token in tokens:
        yield backbone.lm_head(backbone.run_tree(_ids(backbone, [token]), root))
        backbone.cache.keep([0])


def _tree_difference(backbone: Backbone) -> float:
    text, nodes = _tokens(backbone)
    tensors = TreeTensors.of(TREE, backbone.device)
    backbone.cache.crop(0)
    backbone.run_chunk(_ids(backbone, text))
    rows = backbone.lm_head(backbone.run_tree(_ids(backbone, nodes), tensors))
    differences, before = [], list[int]()
    for leaf in TREE.leaves:
        path = list(TREE.paths[leaf])
        known = common_prefix(before, path)
        backbone.cache.crop(len(text) + known)
        plain = _plain_rows(backbone, [nodes[node] for node in path[known:]])
        differences += [share(rows[n], row[0]) for n, row in zip(path[known:], plain, strict=True)]
        before = path
    backbone.cache.crop(0)
    return largest(differences)


@contextmanager
def _unrounded_activations(model: Any) -> Iterator[None]:
    """Let bitsandbytes' int8 linears multiply without rounding the activations. Its rounding makes
    a row depend on the other rows: an input column with a large value in any row is multiplied in
    16 bits for all rows."""
    linears = [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    hooks = [linear.register_forward_hook(_unrounded_product) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _unrounded_product(linear: Any, inputs: tuple[Tensor, ...], rounded: Tensor) -> Tensor:
    scales = linear.state.SCB[:, None] / 127
    weight = (linear.state.CB * scales).to(rounded.dtype)
    return nn.functional.linear(inputs[0], weight, linear.bias)


def can_be_widened(backbone: Backbone) -> bool:
    """Whether all weights are in memory; accelerate reads those on disk module by module."""
    return not any(parameter.is_meta for parameter in backbone.model.parameters())


@torch.no_grad()
def reference_logits(backbone: Backbone, tokens: Tensor) -> Tensor:
    """transformers' logits float32 [t, V] of a causal pass over tokens int64 [t], in fp32. Raises
    ModelError where the family's code fails."""
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
def _widened(module: Any) -> Iterator[None]:
    """Let a module compute in fp32 with the weights that it holds."""
    forward, own = module.forward, module.__dict__.get("forward")  # accelerate's, where it has one
    is_linear = isinstance(module, LINEARS)
    if is_linear:
        module.forward = _Widened(module)
    elif isinstance(module, PackedEmbedding):
        module.forward = lambda ids: module.rows(ids) * module.scale
    elif isinstance(module, nn.Embedding):  # large: some rows are read
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
    """A linear of any kind, [..., K] -> float32 [..., N]. The last product is cached: the parts of
    a merged linear (Outputs) each ask for it."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, self._product(x)
        return self._last[1]

    def _product(self, x: Tensor) -> Tensor:
        linear = self._linear
        if isinstance(linear, NativeLinear):
            x = linear.rounded(x.float())
        parts = [F.linear(x.to(w.device, torch.float32), w) for w in _weights(linear)]
        outputs = torch.cat(parts, -1)
        return outputs if linear.bias is None else outputs + linear.bias.float()


def _weights(linear: Any) -> Iterator[Tensor]:
    """The weight of a linear in blocks of outputs: float32 [n, K]."""
    if isinstance(linear, NativeLinear):
        yield from linear.weight_parts()
    elif isinstance(linear, Int8Linear):
        yield from _int8_weight(linear.codes, linear.scales)
    elif isinstance(linear, Nf4Linear):
        yield _nf4_weight(linear.stock)
    elif is_linear4(linear):
        yield _nf4_weight(linear)
    elif type(linear).__name__ == "Linear8bitLt":
        held = linear.weight if linear.weight.SCB is not None else linear.state
        codes = held.CB if held.CB is not None else linear.weight.data
        yield from _int8_weight(codes, held.SCB)
    else:
        for rows in linear.weight.split(max(1, WIDENED_AT_ONCE // linear.weight.shape[1])):
            yield rows.float()


def _int8_weight(codes: Tensor, scales: Tensor) -> Iterator[Tensor]:
    """Weights that bitsandbytes rounded to 8 bits."""
    rows = max(1, WIDENED_AT_ONCE // codes.shape[1])
    for some, scale in zip(codes.split(rows), scales.split(rows), strict=True):
        yield some * (scale.float()[:, None] / 127)


def _nf4_weight(linear: Any) -> Tensor:
    """Weights that bitsandbytes rounded to 4 bits, as it decodes them."""
    from bitsandbytes.functional import dequantize_4bit

    state = linear.weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        return _nf4_weight_of_cpu_layout(linear.weight.data, state)
    weight: Tensor = dequantize_4bit(linear.weight.data, state)
    return weight.float()


def _nf4_weight_of_cpu_layout(packed: Tensor, state: Any) -> Tensor:
    """The same for bitsandbytes' layout for CPUs with bf16 vectors: two inputs of 32 outputs side
    by side, the first half of these numbers in the low bits of 32 bytes. Its own conversion back
    would round the scales again."""
    outs, ins = state.shape
    bytes_of = packed.view(torch.uint8).view(-1, 32)
    numbers = torch.cat([bytes_of & 15, bytes_of >> 4], 1).view(-1, ins // 2, 32, 2)
    codes = state.code[numbers.transpose(1, 2).reshape(outs, ins).int()]
    return codes.float() * state.absmax.float().t().repeat_interleave(state.blocksize, 1)
