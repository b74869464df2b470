"""Tree check: a backbone's tree steps against its plain steps, and these against transformers.

The first comparison finds wrong masks and positions. Both sides are ours and round alike, so it is
sharp in 16 bits too, where transformers' eager attention is itself far off (Qwen2's large key
biases make scores of hundreds, of which bf16 keeps eight bits). The second, with eager attention in
fp32, finds a wrong scale, norm or rotation; its result is kept, by the model's files, its precision
and what decodes it here, so that no load pays for it twice. The weights of its reference are those
that the loaded model holds, of 16, 8 or 4 bits, and those of one module at a time are widened to
fp32: the whole model in fp32 would not fit beside itself.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat import __version__, paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.devices import describe_device
from medusa_chat.checkpoints.layouts.lora import CONFIG
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.native_step import NativeDecoder
from medusa_chat.decoding.backends.native_weights import NativeLinear
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
# the most that may be due to rounding, of the largest logit. Measured in 16 bits on four models of
# 135M to 1.5B: 0.013 between our own steps where rows round unlike, 0.07 or more where a sibling is
# seen or a position is off by one; 0.04 from fp32, 0.2 or more where a norm is 10 % off
WHOLE = 1e-3  # in fp32
HALF, HALF_FROM_FP32 = 0.05, 0.1
SOME = 2**20  # numbers of a linear's weight that are widened together, a few MB of fp32
FOLDER = "checks"  # of the cache
PACKAGES = ("torch", "transformers")


def check_load(found: Checkpoint, precision: str, backend: StepBackend) -> list[str]:
    """What two checks found, in a sentence each: of a tree step at every load, of plain steps once
    for a model on this device. Raises ModelError."""
    backbone = backend.backbone
    difference = check_tree_step(backbone)
    agrees = "a tree step gives plain steps' logits to the bit"
    if difference > 0:
        agrees = f"a tree step agrees with plain steps (logits within {difference:.1g})"
        if backbone.dtype != torch.float32:
            agrees += ", and texts can part at near ties"
    notes = [f"attention {backbone.implementation}; {agrees}"]
    if not can_be_widened(backbone):
        return [
            *notes,
            "plain steps are not compared with eager attention: some layers are on disk",
        ]
    file = _known_file(found, precision, backend)
    known = _read_known(file)
    if known is None:
        known = check_plain_steps(backbone)
        notes += filter(None, [_keep_known(file, known)])
    return [*notes, f"plain steps agree with eager attention in fp32 (logits within {known:.1g})"]


@torch.no_grad()
def check_tree_step(backbone: Backbone) -> float:
    """Compare the rows of a tree step with plain steps over its paths -> the largest difference of
    their logits over the largest logit. Raises ModelError where it is more than rounding, in C
    where it is any."""
    with _whole_activations(backbone.model), refused(backbone.config, "a tree step fails"):
        worst = _tree_difference(backbone)
    is_native = isinstance(backbone.decoder, NativeDecoder)
    limit = _limit(backbone, HALF_FROM_FP32 if backbone.has_experts else HALF)
    limit = 0.0 if is_native else limit
    if not worst <= limit:
        raise _refusal(backbone, "a tree step differs from plain steps", worst, limit)
    return worst


@torch.no_grad()
def check_plain_steps(backbone: Backbone) -> float:
    """Compare plain steps with the model's own code and eager attention in fp32, its weights as
    they are held -> the largest difference of their logits over the largest logit. Raises
    ModelError where it is more than rounding. All weights must be in memory (can_be_widened)."""
    text, nodes = _tokens(backbone)
    path = [nodes[node] for node in max(TREE.paths, key=len)]
    with _whole_activations(backbone.model), refused(backbone.config, "a plain step fails"):
        backbone.cache.crop(0)
        backbone.run_chunk(_ids(backbone, text))
        rows = list(_plain_rows(backbone, path))
        backbone.cache.crop(0)
    reference = reference_logits(backbone, _ids(backbone, text + path))[len(text) :]
    reference = reference.to(backbone.device)
    found = [share(row[0], own) for row, own in zip(rows, reference, strict=True)]
    # near a tie a row goes through another expert and is another one: half of the rows count then
    worst = float(torch.tensor(found).median()) if backbone.has_experts else largest(found)
    limit = _limit(backbone, HALF_FROM_FP32)
    if not worst <= limit:
        what = "a plain step differs from transformers' eager attention in fp32"
        raise _refusal(backbone, what, worst, limit)
    return worst


def check_steps(backbone: Backbone) -> float:
    """Both comparisons -> the larger difference. Raises ModelError."""
    return max(check_tree_step(backbone), check_plain_steps(backbone))


def _limit(backbone: Backbone, half: float) -> float:
    return WHOLE if backbone.dtype == torch.float32 else half


def _refusal(backbone: Backbone, what: str, worst: float, limit: float) -> ModelError:
    """What was compared, how far apart it was, and how to go on."""
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
    """A text, and tokens for the nodes of TREE behind it."""
    size = backbone.vocabulary
    text = [(7 * i + 3) % size for i in range(min(8, backbone.context - 4))]
    return text, [(11 * i + 5) % size for i in range(len(TREE))]


def _ids(backbone: Backbone, tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, device=backbone.device)


def _plain_rows(backbone: Backbone, tokens: Sequence[int]) -> Iterator[Tensor]:
    """The logits [1, V] of a plain step over each token, which the cache then holds."""
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
    found, before = [], list[int]()
    for leaf in TREE.leaves:
        path = list(TREE.paths[leaf])
        known = common_prefix(before, path)
        backbone.cache.crop(len(text) + known)
        plain = _plain_rows(backbone, [nodes[node] for node in path[known:]])
        found += [share(rows[n], row[0]) for n, row in zip(path[known:], plain, strict=True)]
        before = path
    backbone.cache.crop(0)
    return largest(found)


@contextmanager
def _whole_activations(model: Any) -> Iterator[None]:
    """Linears of bitsandbytes' int8 multiply by the weights they hold and round no activations,
    which of two equal rows in other company gives other results: a column of the input in which
    any row is large is multiplied in 16 bits, for all rows."""
    found = [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    hooks = [linear.register_forward_hook(_whole_product) for linear in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _whole_product(linear: Any, inputs: tuple[Tensor, ...], rounded: Tensor) -> Tensor:
    scales = linear.state.SCB[:, None] / 127
    weight = (linear.state.CB * scales).to(rounded.dtype)
    return nn.functional.linear(inputs[0], weight, linear.bias)


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


def _known_file(found: Checkpoint, precision: str, backend: StepBackend) -> Path:
    """The file of this model's check; it need not exist."""
    backbone = backend.backbone
    files = [found.backbone / name for name in found.weights.files]
    files += [] if found.weights.stored else [found.backbone / "config.json"]
    if found.adapter is not None:
        files += [found.adapter, found.adapter.with_name(CONFIG)]
    facts = [
        *(__version__, *map(metadata.version, PACKAGES)),
        *(precision, str(backbone.dtype), describe_device(backbone.device)),
        *(type(backend).__name__, backbone.implementation, backbone.context),
    ]
    return paths.cache_dir() / FOLDER / f"{kept_copies.digest(facts, files)}.json"


def _read_known(file: Path) -> float | None:
    """The difference that was found before; None where nothing is known."""
    try:
        value = json.loads(file.read_text("utf-8"))["difference"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _keep_known(file: Path, difference: float) -> str:
    """Keep a difference; why that cannot be done, in a sentence, or nothing."""
    try:
        paths.write_text(file, json.dumps({"difference": difference}))
    except OSError as error:
        return f"the check of this model is made at each load: {file.parent}: {error.strerror}"
    return ""
