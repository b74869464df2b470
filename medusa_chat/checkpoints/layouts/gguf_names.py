"""Names: what transformers calls the tensors of a GGUF file, for the families that are read."""

import re
from collections.abc import Mapping

from medusa_chat.checkpoints.layouts.entry import Entry
from medusa_chat.checkpoints.layouts.gguf_types import GgufHeader
from medusa_chat.errors import ModelError

LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
FOUR_NORMS = SHARED | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MERGED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
INSIDE: Mapping[str, Mapping[str, str]] = {  # by the family's name in a GGUF file
    "llama": ONE_NORM,
    "qwen2": ONE_NORM,
    "qwen3": ONE_NORM | QUERY_NORMS,
    "gemma2": FOUR_NORMS,
    "gemma3": FOUR_NORMS | QUERY_NORMS,
    "phi3": ONE_NORM | MERGED,
}
# frequencies of the rotary embedding, which become part of the config (gguf_rope.py)
ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def renamed(header: GgufHeader, family: str, where: str) -> dict[str, str]:
    """The file's name of each tensor of the model -> that of transformers. Raises ModelError for a
    tensor that has no place in the family."""
    names = {}
    for name in header.tensors:
        if name in ROPE:
            continue
        match = LAYER.fullmatch(name)
        inside = INSIDE[family].get(match[2]) if match else None
        found = f"model.layers.{match[1]}.{inside}.{match[3]}" if match and inside else None
        if (place := OUTER.get(name, found)) is None:
            raise ModelError(
                f"{where} holds the tensor {name[:80]!r}, which the family {family} has no place "
                "for: take another GGUF file, or the model's safetensors"
            )
        names[name] = place
    return names


def entries(header: GgufHeader, names: Mapping[str, str]) -> dict[str, Entry]:
    """The tensors as transformers names them, with their shapes."""
    return {place: Entry("F32", header.tensors[name].shape) for name, place in names.items()}
