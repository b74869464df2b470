"""Names: what transformers calls the tensors of a GGUF file, for the families that are read."""

import re
from collections.abc import Mapping

from medusa_chat.checkpoints.layouts.gguf_header import GgufHeader, count, layers_of
from medusa_chat.checkpoints.layouts.headers import Entry
from medusa_chat.errors import ModelError

INNER = re.compile(r"blk\.(\d{1,5})\.")
LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias|scale)")
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
SHARED = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ONE_NORM = SHARED | {"ffn_norm": "post_attention_layernorm"}
QUERY_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LATE_NORM = {"post_attention_norm": "post_attention_layernorm"}
POST_NORMS = LATE_NORM | {"post_ffw_norm": "post_feedforward_layernorm"}
FOUR_NORMS = SHARED | POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
GLM_NORMS = ONE_NORM | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
MERGED = {"ffn_up": "mlp.gate_up_proj"}
STACKED = {  # of all experts of a layer; transformers has each one's gate and up side by side
    "ffn_gate_exps": "experts.gate_up_proj",
    "ffn_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
}
SHARED_GATE = "ffn_gate_inp_shexp"
EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {key: f"mlp.{name}" for key, name in STACKED.items()}
EVERY = {  # the expert that every token has
    SHARED_GATE: "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_EXPERTS = {  # the same where there may be several, side by side, and no gate
    key: name.replace("expert.", "experts.") for key, name in EVERY.items() if key != SHARED_GATE
}
LATENT = {  # keys and values made of one short vector
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("attn_kv_b", "attn_k_b", "attn_v_b"), "self_attn.kv_b_proj"),
}
CHOICE = "e_score_correction"  # a bias for the choice of experts alone
CHOSEN = EXPERTS | SHARED_EXPERTS | {"exp_probs_b": f"mlp.gate.{CHOICE}"}
SINKS = {"attn_sinks": "self_attn.sinks"}
ROUTED = EXPERTS | {"ffn_gate_inp": "mlp.router"}
SPARSE = {"ffn_gate_inp": "block_sparse_moe.router"}
SPARSE |= {key: f"block_sparse_moe.{name}" for key, name in STACKED.items()}
GEMMA4_INPUTS = {  # of each layer, and what its output is multiplied with
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}
GEMMA4_SCALES = {
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
GEMMA4_EXPERTS = {  # beside an MLP
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    **STACKED,
    **GEMMA4_SCALES,
}
INSIDE: dict[str, Mapping[str, str]] = {  # by the family's name in a GGUF file
    "llama": ONE_NORM | EXPERTS,
    "mistral3": ONE_NORM,
    "smollm3": ONE_NORM,
    "granite": ONE_NORM,
    "granitemoe": ONE_NORM | SPARSE,
    "qwen2": ONE_NORM,
    "qwen2moe": ONE_NORM | EXPERTS | EVERY,
    "qwen3": ONE_NORM | QUERY_NORMS,
    "qwen3moe": ONE_NORM | QUERY_NORMS | EXPERTS,
    "gemma": ONE_NORM,
    "gemma2": FOUR_NORMS,
    "gemma3": FOUR_NORMS | QUERY_NORMS,
    "gemma4": FOUR_NORMS | QUERY_NORMS | GEMMA4_INPUTS | GEMMA4_EXPERTS,
    "phi3": ONE_NORM | MERGED | {"attn_qkv": "self_attn.qkv_proj"},
    "glm4": GLM_NORMS | MERGED,
    "glm4moe": SHARED | LATE_NORM | QUERY_NORMS | CHOSEN,
    "deepseek2": ONE_NORM | LATENT | CHOSEN,
    "minimax-m2": ONE_NORM | QUERY_NORMS | EXPERTS | {"exp_probs_b": f"mlp.{CHOICE}"},
    "olmo2": SHARED | POST_NORMS | QUERY_NORMS,
    "olmoe": ONE_NORM | QUERY_NORMS | EXPERTS,
    "exaone4": SHARED | POST_NORMS | QUERY_NORMS,
    "command-r": SHARED,
    "cohere2": SHARED,
    "seed_oss": SHARED | LATE_NORM,
    "gpt-oss": SHARED | LATE_NORM | SINKS | ROUTED,
    "ernie4_5": ONE_NORM,
    "hunyuan-dense": ONE_NORM
    | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
}
# the text parts of vision-language models, and the families that they are
TEXT_PARTS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
INSIDE |= {name: INSIDE[family] for name, family in TEXT_PARTS.items()}
# no modules: their names end without a kind
LEAVES = (*STACKED.values(), *SINKS.values(), *GEMMA4_SCALES.values(), CHOICE, "layer_scalar")
PARAMETERS = tuple(f".{name}" for name in LEAVES)
TURNED = ("gpt-oss",)  # transformers has experts as [in, out], each gate's column before its up's
# frequencies of the rotary embedding, which become part of the config (gguf_rope.py)
ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
GEMMA4 = "gemma4"
TURNED_KEYS = ".attn_k_b.weight"  # of each head [vector, width], as no other matrix is
VALUES = ".attn_v_b.weight"
GEMMA4_SHARED = f"{GEMMA4}.attention.shared_kv_layers"
KEYS_AND_VALUES = ("attn_k", "attn_v", "attn_k_norm")


def renamed(header: GgufHeader, family: str, where: str) -> dict[str, str]:
    """The file's name of each tensor of the model -> that of transformers. Raises ModelError for a
    tensor that has no place in the family."""
    names, layers = {}, layers_of(header.metadata, family, where)
    drafting = range(layers, count(header.metadata, f"{family}.block_count", where))
    for name in header.tensors:
        if name in ROPE or ((match := INNER.match(name)) and int(match[1]) in drafting):
            continue
        match = LAYER.fullmatch(name)
        if match and is_unread(header, int(match[1]), match[2]):
            continue
        what = match[2] + ".scale" * (match[3] == "scale") if match else ""
        inside = INSIDE[family].get(what)
        found = _in_layer(match[1], inside, match[3]) if match and inside else None
        if (place := OUTER.get(name, found)) is None:
            raise ModelError(
                f"{where} holds the tensor {name[:80]!r}, which the family {family} has no place "
                "for: take another GGUF file, or the model's safetensors"
            )
        names[name] = place
    return names


def _in_layer(layer: str, inside: str, kind: str) -> str:
    bare = {"weight": "", "scale": "", "bias": "_bias"}
    return f"model.layers.{layer}.{inside}" + (
        bare[kind] if f".{inside}".endswith(PARAMETERS) else f".{kind}"
    )


def shapes(header: GgufHeader, names: Mapping[str, str], family: str) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor as transformers names it, in the order in which they are written;
    of gates and ups that do not fit each other ()."""
    found: dict[str, tuple[int, ...]] = {}
    for name, place in names.items():
        shape = header.tensors[name].shape
        if SHARED_GATE in name and len(shape) == 1:
            shape = (1, *shape)
        if is_split(name):
            shape = whole_shape(header, name)
        elif place in found:
            fits = found[place] == shape and len(shape) > 1
            shape = (shape[0], 2 * shape[1], *shape[2:]) if fits else ()
        found[place] = shape
    if family in TURNED:
        return {place: (*shape[:1], *shape[:0:-1]) for place, shape in found.items()}
    return found


def entries(header: GgufHeader, names: Mapping[str, str], family: str) -> dict[str, Entry]:
    """The tensors as transformers names them, with their shapes."""
    return {place: Entry("F32", shape) for place, shape in shapes(header, names, family).items()}


def is_unread(header: GgufHeader, layer: int, tensor: str) -> bool:
    """Whether it would make keys or values of a layer that reads those of one before it: a file may
    hold what the model was trained with, and neither llama.cpp nor transformers reads it."""
    layers, shared = (
        header.metadata.get(f"{GEMMA4}.block_count"),
        header.metadata.get(GEMMA4_SHARED),
    )
    if tensor not in KEYS_AND_VALUES or type(layers) is not int or type(shared) is not int:
        return False
    return layer >= layers - shared


def is_split(name: str) -> bool:
    """Whether a tensor is one of the two parts of what makes keys and values."""
    return name.endswith((TURNED_KEYS, VALUES))


def whole_shape(header: GgufHeader, name: str) -> tuple[int, ...]:
    """The shape of both parts together, head by head; () where they do not fit each other."""
    layer = name.removesuffix(TURNED_KEYS).removesuffix(VALUES)
    parts = [header.tensors.get(layer + part) for part in (TURNED_KEYS, VALUES)]
    keys, values = (part.shape if part else () for part in parts)
    if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
        return ()
    return keys[0] * (keys[2] + values[1]), keys[1]
