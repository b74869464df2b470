"""LayerForm: what a decoder layer of a model family computes, described once, as data.

Both the merged layer of torch (fused_layers.py) and the pass in C (backends/native_step.py) read
this description. It is made from the layer's own module and config, which are transformers'.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.families import MOST_EXPERTS, gate_of, window_of

# classes of layers: attention and gated products, a norm before each, and a sum after each
PLAIN = "Llama Mistral Qwen2 Qwen3 Phi3 Ministral3 SmolLM3 Granite Gemma".split()
MIXED = (
    "Qwen3Moe Mixtral GraniteMoe GptOss".split()
)  # the same with experts in all layers or in some
POST_NORMED = "Gemma2 Gemma3 Gemma4Text".split()  # the same, what is added is normed too
LAYERS = {f"{family}DecoderLayer" for family in (*PLAIN, *MIXED, *POST_NORMED)}
RAISED_NORMS = {f"{family}RMSNorm" for family in ("Gemma", "Gemma2", "Gemma3")}  # 1 + weight
GATES_UPS, DOWNS = "gate_up_proj", "down_proj"  # the weights of all experts of a layer
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def parts_of(parent: Any, whole: str) -> tuple[str, ...]:
    """The names of the linears of an attention or MLP block that make the product `whole`: itself
    where the family has it so (Phi-3), and of keys and values those that there are (Gemma 4)."""
    if hasattr(parent, whole):
        return (whole,)
    return tuple(name for name in PARTS[whole] if getattr(parent, name, None) is not None)


def is_described(layer: nn.Module) -> bool:
    """Whether a LayerForm says all that this layer does: a known family, a known gate, and no row
    that sees one behind it."""
    known: Any = layer
    if type(layer).__name__ not in LAYERS or getattr(layer, "enable_moe_block", False):
        return False
    attention = known.self_attn
    if (mixture := mixture_of(layer)) is not None and ExpertsForm.of(mixture).count > MOST_EXPERTS:
        return False
    has_gate = gate_of(attention.config.to_dict()) is not None
    return bool(has_gate and getattr(attention, "is_causal", True))


def are_experts(module: Any) -> bool:
    """Whether a module of transformers is experts that C can have: with a gate, and weights of all
    of them as one."""
    has_both = all(isinstance(getattr(module, key, None), Tensor) for key in (GATES_UPS, DOWNS))
    if not has_both or not hasattr(module, "_apply_gate"):
        return False
    is_known = getattr(module, "has_gate", False) and not module.has_post_expert_norm
    return bool(is_known) and getattr(module, GATES_UPS).dim() == 3


def mixture_of(layer: Any) -> Any:
    """The block of a layer that has a router and experts; None where it has none."""
    block = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
    return block if hasattr(block, "experts") else None


def is_for_c(layer: Any) -> bool:
    """Whether only C gains by the description of a layer, and torch takes the stock one: its merged
    one scores experts in fp32, which the family's own may not, or was never tried on a GPU."""
    return mixture_of(layer) is not None or type(layer).__name__.startswith("Gemma4")


def router_of(mixture: Any) -> Any:
    """What scores the experts of a mixture: it has a weight [count, d], and a bias in some
    families."""
    return mixture.router if hasattr(mixture, "router") else mixture.gate


@dataclass(frozen=True)
class ExpertsForm:
    """count: experts of a layer; chosen: of a row; is_normed: whether these count by their shares
    among the chosen ones, not among all."""

    count: int
    chosen: int
    is_normed: bool

    @classmethod
    def of(cls, mixture: Any) -> "ExpertsForm":
        """The form of a layer's block with a router."""
        router = router_of(mixture)
        is_normed = bool(getattr(router, "norm_topk_prob", True))
        return cls(len(router.weight), int(router.top_k), is_normed)

    def choice(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores float32 [n, count] -> the experts int64 [n, chosen] of each row, and their shares
        float32."""
        best, experts = scores.topk(self.chosen, -1)
        if self.is_normed:
            return experts, best.softmax(-1)
        return experts, torch.exp(best - scores.logsumexp(-1, True))


@dataclass(frozen=True)
class LayerForm:
    """heads: of queries, and of keys and values, `width` numbers each; kind: of its rotary angles
    where the model has several; is_turned: whether queries and keys are rotated at all; is_halved:
    whether the family's rotary embedding gives each angle once, not for both halves of a head;
    window: positions that a row sees, itself included, None: all; scaling: of scores, which a cap
    bends to cap * tanh(score / cap); has_sinks: whether each head has a score that takes its share
    beside the keys'; residual: factor of what is added; growth: beta and length, of queries
    multiplied by 1 + beta log(1 + floor(position / length)); experts: of a layer that has some;
    clamp: alpha and limit of clamped gates; source: the layer before it, counted from 0, whose keys
    and values it reads, and has none then; are_keys_values: whether values are its keys before
    their norm."""

    heads: tuple[int, int]
    width: int
    gate: str
    scaling: float
    kind: str | None = None
    is_turned: bool = True
    window: int | None = None
    cap: float | None = None
    residual: float = 1.0
    growth: tuple[float, int] | None = None
    experts: ExpertsForm | None = None
    clamp: tuple[float, float] | None = None
    is_halved: bool = False
    has_sinks: bool = False
    source: int | None = None
    are_keys_values: bool = False

    @property
    def outputs(self) -> list[int]:
        """How many outputs its linears of queries, keys and values have, those that there are."""
        queries, keys = (heads * self.width for heads in self.heads)
        if self.source is not None:
            return [queries]
        return [queries, keys] if self.are_keys_values else [queries, keys, keys]

    @classmethod
    def of(cls, layer: Any) -> "LayerForm":
        """The form of a layer that `is_described`."""
        attention = layer.self_attn
        config, index = attention.config, attention.layer_idx
        kinds = getattr(config, "layer_types", None)
        kind = kinds[index] if kinds else None
        family = type(layer).__name__.removesuffix("DecoderLayer")
        mixture = mixture_of(layer)
        return cls(
            heads=(config.num_attention_heads, _key_heads(config, index)),
            width=attention.head_dim,
            gate=gate_of(config.to_dict()) or "",
            scaling=attention.scaling,
            kind=kind,
            is_turned=bool(getattr(attention, "use_rope", True)),
            window=window_of(config, kind),
            # Gemma 3's code reads no cap
            cap=attention.attn_logit_softcapping if family == "Gemma2" else None,
            residual=float(getattr(layer, "residual_multiplier", 1.0)),
            growth=_growth(config) if family == "Ministral3" else None,
            experts=None if mixture is None else ExpertsForm.of(mixture),
            clamp=(config.swiglu_alpha, config.swiglu_limit) if family == "GptOss" else None,
            is_halved=family == "GptOss",
            has_sinks=hasattr(attention, "sinks"),
            source=_source(attention),
            are_keys_values=getattr(attention, "use_alternative_attention", False),
        )

    def growth_at(self, positions: Tensor) -> Tensor:
        """The factors float32 of queries at positions int64 of any shape."""
        assert self.growth is not None
        beta, length = self.growth
        return 1 + beta * torch.log(1 + torch.floor(positions / length))


def _key_heads(config: Any, index: int) -> int:
    """Heads of keys and values of a layer."""
    layers = getattr(config, "per_layer_config", None)
    own = config if layers is None else layers[index]
    return int(own.num_key_value_heads)


def _source(attention: Any) -> int | None:
    """The last layer of the same kind with keys and values of its own, where this one has none."""
    if not getattr(attention, "is_kv_shared_layer", False):
        return None
    config = attention.config
    kinds = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    return max(i for i, kind in enumerate(kinds) if kind == attention.layer_type)


def _growth(config: Any) -> tuple[float, int]:
    rope = config.rope_parameters
    return float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"])


def norms_around(layer: Any) -> tuple[Any, Any, Any, Any]:
    """A layer's norms of the attention's input and of what it adds, of the gated products' input
    and of what they add; None where there is none."""
    if type(layer).__name__.removesuffix("DecoderLayer") in POST_NORMED:
        inner = layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
        return layer.input_layernorm, layer.post_attention_layernorm, *inner
    return layer.input_layernorm, None, layer.post_attention_layernorm, None


def norm_weight(norm: Any) -> Tensor:
    """What a norm multiplies by, float32 [d]."""
    weight: Tensor = norm.weight.detach().float()
    return weight + 1 if type(norm).__name__ in RAISED_NORMS else weight


def norm_epsilon(norm: Any) -> float:
    """What a norm adds to the mean square."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def embedding_scale(decoder: Any) -> float:
    """What a decoder multiplies the rows of its embedding by, rounded as its weights are."""
    embedding = decoder.embed_tokens
    scale = getattr(embedding, "embed_scale", None)
    own = getattr(embedding, "scale", 1.0)  # of one that is packed
    own = own if scale is None else float(scale.to(embedding.weight.dtype))
    return own * float(getattr(decoder, "embedding_multiplier", 1.0))


def own_table(model: Any) -> Any:
    """The embedding of what each layer reads of a token beside its input, [V, layers * width];
    None where layers read nothing else."""
    return getattr(model.get_decoder(), "embed_tokens_per_layer", None)


def angles_of(rotary: Any, x: Tensor, positions: Tensor, form: LayerForm) -> tuple[Tensor, Tensor]:
    """cos and sin [1, n, R] in the dtype of x at positions int64 [1, n], of layers of this form."""
    if hasattr(rotary, "layer_types"):
        return whole_angles(rotary(x, positions, form.kind), form)
    return whole_angles(rotary(x, position_ids=positions), form)


def whole_angles(angles: tuple[Tensor, Tensor], form: LayerForm) -> tuple[Tensor, Tensor]:
    """cos and sin [1, n, R] of those that a family's rotary embedding gives."""
    cos, sin = angles
    return (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)) if form.is_halved else (cos, sin)
