"""Tree check: a backbone's tree steps against its plain steps, and these against transformers.

The first comparison finds wrong masks and positions. Both sides are ours and round alike, so it is
sharp in 16 bits too, where transformers' eager attention is itself far off (Qwen2's large key
biases make scores of hundreds, of which bf16 keeps eight bits). The second, with eager attention in
fp32, finds a wrong scale, norm or rotation.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.checkpoints.reference import reference_logits
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.native_step import NativeDecoder
from medusa_chat.decoding.backends.parity import largest, share
from medusa_chat.decoding.draft import TreeTensors
from medusa_chat.decoding.kv_cache import refused
from medusa_chat.decoding.probe import common_prefix
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ModelError

TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 0, 0), (1, 0)])
# the most that may be due to rounding, of the largest logit. Measured in 16 bits on four models of
# 135M to 1.5B: 0.013 between our own steps where rows round unlike, 0.07 or more where a sibling is
# seen or a position is off by one; 0.04 from fp32, 0.2 or more where a norm is 10 % off
WHOLE = 1e-3  # in fp32
HALF, HALF_FROM_FP32 = 0.05, 0.1


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
