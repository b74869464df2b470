"""Medusa heads in the terms of vLLM's Medusa method: its tensors and its config.

vLLM 0.32 drafts a chain: the first choice of each head. Its heads are residual layers, each a
square linear and SiLU, and either one LM head for all, which may hold some tokens only (named by a
token map), or one for each, over the whole vocabulary (its `model_executor/models/medusa.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from medusa_chat.checkpoints.head_tensors import (
    LAYER,
    LM_HEAD,
    ONE_LM_HEAD,
    ROOT,
    TOKEN_MAP,
    tensors_of,
)
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import ModelError


@dataclass(frozen=True)
class VllmHeads:
    """tensors and config as vLLM names them. tokens: how many a draft is taken from."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    tokens: int

    @classmethod
    def of(
        cls,
        heads: MedusaHeads,
        lm_head: LogitHead | None,
        shortlist: Sequence[int],
        vocabulary: int,
    ) -> "VllmHeads":
        """Express heads on the CPU, their weights [layers, K, d, d], for a backbone of so many
        tokens; they are changed and of no other use afterwards. lm_head: the backbone's, for heads
        that share it. shortlist: tokens to draft from, empty for all; one LM head for each head is
        written whole. Raises ModelError, by name, for what vLLM has no place for."""
        tensors = vllm_names(tensors_of(heads))
        own = [name for name in tensors if name.startswith("lm_heads.")]
        is_one = heads.lm_weight is None or len(heads.lm_weight) == 1
        tokens = vocabulary
        if is_one:
            weight, names = _one_lm_head(heads, lm_head, shortlist, vocabulary)
            tensors = {name: t for name, t in tensors.items() if name not in own}
            tensors[ONE_LM_HEAD] = weight.contiguous()
            if names is not None:
                tensors[TOKEN_MAP], tokens = names, len(names)
        elif heads.token_map is not None:
            raise ModelError(
                "heads with a token map and an LM head each cannot be exported: vLLM supports a "
                "token map only for one LM head shared by all heads"
            )
        return cls(tensors, _config(heads, vocabulary, tokens, is_one), tokens)


def vllm_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of `tensors_of` -> the same tensors, shapes and dtypes (layers
    [d, d], biases [d], LM heads [R, d]), under vLLM's, without a token map. Raises ModelError for
    one that its heads have no part for."""
    named = {}
    for name, tensor in tensors.items():
        if match := LAYER.match(name):
            _require_residual(name, tensor)
            named[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        elif match := LM_HEAD.match(name):
            named[f"lm_heads.{match[1]}.weight"] = tensor
        elif ROOT.match(name):
            raise ModelError(
                f"the heads' {name} cannot be exported: vLLM's Medusa heads do not read the root, "
                "the token that is certain when they draft; train heads with --no-root for it"
            )
        elif name != TOKEN_MAP:
            raise ModelError(_no_place(name))
    return named


def _require_residual(name: str, tensor: Tensor) -> None:
    """Its input is added to its output, so they are of one size."""
    if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
        raise ModelError(_no_place(f"{name}, {tensor.shape[0]} x {tensor.shape[1]}"))


def _no_place(part: str) -> str:
    return (
        f"the heads' {part} cannot be exported: vLLM's Medusa heads are residual layers of a "
        "square linear and SiLU before an LM head; train heads of that shape for it"
    )


def _one_lm_head(
    heads: MedusaHeads, lm_head: LogitHead | None, shortlist: Sequence[int], vocabulary: int
) -> tuple[Tensor, Tensor | None]:
    """The LM head [R, d] of all heads, and the tokens int64 [R] of its rows; None: all in order.
    vLLM takes a token map for less than all alone."""
    if lm_head is not None and getattr(lm_head.linear, "bias", None) is not None:
        raise ModelError(
            "heads that share an LM head with a bias cannot be exported: vLLM's Medusa heads have "
            "none there"
        )
    heads.shorten(shortlist, lm_head)
    names = heads.token_map if heads.shortlist is None else heads.shortlist
    weight: Any = heads.short.weight if heads.short is not None else heads.lm_weight
    if weight is None:
        assert lm_head is not None
        weight = lm_head.linear.weight
    weight = weight[0] if weight.dim() == 3 else weight
    if names is None:
        return weight, None
    if len(names) == vocabulary:
        return weight[names.argsort()], None
    return weight[: len(names)], names.clone()


def _config(heads: MedusaHeads, vocabulary: int, tokens: int, is_one: bool) -> dict[str, Any]:
    layers, count, hidden, _ = heads.weight.shape
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "num_heads": count,
        "num_hidden_layers": layers,
        "medusa_fc_bias": True,
        "original_lm_head": is_one,
        "truncated_vocab_size": tokens,
    }
