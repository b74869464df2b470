"""Tree check: whether one tree step of a loaded backbone equals causal passes over its paths."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.draft import TreeTensors
from medusa_chat.decoding.kv_cache import refused
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ModelError


@torch.no_grad()
def check_tree_step(backbone: Backbone) -> float:
    """Compare one tree step with causal passes over its paths, and our logits with the model's own.
    Returns the largest difference over the largest logit; raises ModelError when it is more than
    rounding. What bitsandbytes' int8 does to activations is left out of both: on SmolLM2 it alone
    makes 0.17, and a mask that shows a sibling no more than 0.24."""
    with _whole_activations(backbone.model), refused(backbone.config, "a tree step fails"):
        worst = _difference(backbone)
    limit = 1e-3 if backbone.dtype == torch.float32 else 0.1
    if not worst <= limit:
        is_whole = backbone.dtype == torch.float32
        kind = "" if is_whole else f" in {str(backbone.dtype).removeprefix('torch.')}"
        remedy = "" if is_whole else ": try --precision fp32"
        raise ModelError(
            f"model family {backbone.config.model_type} is not supported{kind}: a tree step "
            f"differs from a causal pass by {worst:.2g} of the largest logit, more than {limit:g}"
            f"{remedy}"
        )
    return worst


def _difference(backbone: Backbone) -> float:
    device, vocabulary = backbone.device, backbone.vocabulary
    text = [(7 * i + 3) % vocabulary for i in range(min(8, backbone.context - 4))]
    tree = Tree.from_choices([(0,), (1,), (0, 0), (0, 0, 0), (1, 0)])
    nodes = [(11 * i + 5) % vocabulary for i in range(len(tree))]
    backbone.cache.crop(0)
    backbone.run_chunk(torch.tensor(text, device=device))
    ids = torch.tensor(nodes, device=device)
    mine = backbone.lm_head(backbone.run_tree(ids, TreeTensors.of(tree, device)))
    worst = 0.0
    for node in tree.leaves:
        path = list(tree.paths[node])
        whole = torch.tensor([text + [nodes[i] for i in path]], device=device)
        logits = _reference(backbone, whole)[len(text) :]
        scale = float(logits.abs().max()) or 1.0
        worst = max(worst, float((mine[path] - logits).abs().max()) / scale)
    backbone.cache.crop(0)
    return worst


def _reference(backbone: Backbone, ids: Tensor) -> Tensor:
    """The model's own logits [t, V] of a causal pass with its eager attention."""
    backbone.model.set_attn_implementation("eager")
    try:
        logits: Tensor = backbone.model(input_ids=ids, use_cache=False).logits[0]
    finally:
        backbone.model.set_attn_implementation(backbone.implementation)
    return logits


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
