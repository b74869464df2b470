"""The config of a GGUF model, as transformers has it, from the metadata of the file.

A table of our own: whether a model fits must be known without any package, and transformers 5.23
takes a head's width, windows and rotary scaling from its defaults where the file says otherwise.
"""

from collections.abc import Mapping
from typing import Any

from medusa_chat.checkpoints.layouts.gguf_deepseek import as_many_heads
from medusa_chat.checkpoints.layouts.gguf_family import CENTRED, READ, class_of, own_values
from medusa_chat.checkpoints.layouts.gguf_gemma4 import as_first_layer
from medusa_chat.checkpoints.layouts.gguf_header import TOKENS
from medusa_chat.checkpoints.layouts.gguf_names import INSIDE
from medusa_chat.checkpoints.layouts.gguf_numbers import count, layers_of
from medusa_chat.checkpoints.layouts.gguf_rope import rope_parameters
from medusa_chat.checkpoints.layouts.gguf_types import GgufHeader
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.errors import ModelError

COUNTS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
SMALLEST_LAYER = 6  # tensors of it, phi3's
IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
ENDS = ("eos", "eot", "eom")
# what changes the arithmetic and is not read; a family that has it is written under another name
UNREAD = (
    *("expert_count", "attention.scale", "logit_scale", "residual_scale", "embedding_scale"),
    *("expert_gating_func", "expert_weights_scale", "attention.temperature_scale"),
    *("attention.clamp_kqv", "attention.max_alibi_bias", "rope.dimension_sections"),
    "rope.scaling.yarn_log_multiplier",
)


def family_of(header: GgufHeader, where: str) -> str:
    """The family's name in a GGUF file. Raises ModelError for one that is not read."""
    family = header.metadata.get("general.architecture")
    if family not in INSIDE:
        known = ", ".join(INSIDE)
        raise ModelError(
            f"{where} is of the family {str(family)[:40]!r}, and {known} are supported: take the "
            "model's safetensors"
        )
    return str(family)


def gguf_config(header: GgufHeader, source: Source, file: str) -> dict[str, Any]:
    """The values of its config.json. Raises ModelError for what is missing or out of range."""
    where = f"{source.name}/{file}"
    family = family_of(header, where)
    whole, header = header, as_many_heads(as_first_layer(header))
    metadata = header.metadata
    for key in UNREAD:
        if metadata.get(f"{family}.{key}") and key not in READ.get(family, ()):
            raise ModelError(
                f"{where} has {family}.{key}, which is not supported: take the model's safetensors"
            )
    config = {ours: count(metadata, f"{family}.{key}", where) for ours, key in COUNTS.items()}
    config["num_hidden_layers"] = layers_of(metadata, family, where)
    if config["num_hidden_layers"] > len(header.tensors) // SMALLEST_LAYER:
        raise ModelError(f"{where} has fewer tensors than {family}.block_count: fetch it again")
    heads = config["num_attention_heads"]
    width = _width(metadata, family, config["hidden_size"] // heads, where)
    kind, name = class_of(header, family)
    few = count(metadata, f"{family}.attention.head_count_kv", where, heads)
    return config | {
        "model_type": kind,
        "architectures": [name],
        "num_key_value_heads": few,
        **_epsilon(metadata, family, where),
        "vocab_size": _rows(header, where),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope_parameters(header, family, kind, width, source, file),
        **{f"{o}_token_id": metadata.get(f"tokenizer.ggml.{k}_token_id") for o, k in IDS.items()},
        **own_values(whole, family, kind, config, width, where),
    }


def end_tokens(header: GgufHeader) -> list[int]:
    """Every id that ends a turn, the usual one first."""
    found = [header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ENDS]
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _epsilon(metadata: Mapping[str, Any], family: str, where: str) -> dict[str, float]:
    ours, theirs = ("layer_norm_eps", "") if family in CENTRED else ("rms_norm_eps", "rms_")
    key = f"{family}.attention.layer_norm_{theirs}epsilon"
    value = metadata.get(key)
    if type(value) is not float or not 0 <= value < 1:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): fetch it again")
    return {ours: value}


def _width(metadata: Mapping[str, Any], family: str, usual: int, where: str) -> int:
    """Numbers of an attention head, in keys and values alike."""
    known = f"{family}.attention.key_length"
    key = known if known in metadata or family != "llama" else "llama.rope.dimension_count"
    width = count(metadata, key, where, max(usual, 1))
    if metadata.get(f"{family}.attention.value_length", width) != width:
        raise ModelError(
            f"{where} has keys of {width} numbers and values of another width, which is not "
            "supported: take the model's safetensors"
        )
    return width


def _rows(header: GgufHeader, where: str) -> int:
    """Rows of the embeddings: tokens, and what pads them."""
    table = header.tensors.get("token_embd.weight")
    rows = table.shape[0] if table else 0
    if rows < header.metadata[TOKENS]:
        raise ModelError(
            f"{where} has embeddings for {rows} tokens and a vocabulary of "
            f"{header.metadata[TOKENS]}: fetch it again"
        )
    return rows
