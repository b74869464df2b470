"""The config of a GGUF model, as transformers has it, from the metadata of the file.

A table of our own: whether a model fits must be known without any package, and transformers 5.23
takes a head's width, windows and rotary scaling from its defaults where the file says otherwise.
"""

from collections.abc import Mapping
from typing import Any

from medusa_chat.checkpoints.layouts.gguf_header import TOKENS
from medusa_chat.checkpoints.layouts.gguf_names import INSIDE
from medusa_chat.checkpoints.layouts.gguf_rope import rope_parameters
from medusa_chat.checkpoints.layouts.gguf_types import GgufHeader
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.errors import ModelError

CLASSES = {  # model_type and class in transformers, by the family's name in a GGUF file
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
MISTRAL = ("mistral", "MistralForCausalLM")  # is told as llama, and may have a window
WINDOWED = ("llama", "phi3", "gemma2", "gemma3")
COUNTS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
ENDS = ("eos", "eot", "eom")
MAX_COUNT = 2**31
# what changes the arithmetic and is not read; a family that has it is written under another name
UNREAD = (
    *("expert_count", "attention.scale", "logit_scale", "residual_scale", "embedding_scale"),
    *("attention.clamp_kqv", "attention.max_alibi_bias"),
)
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, which alone scale queries otherwise


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
    metadata = header.metadata
    for key in UNREAD:
        if metadata.get(f"{family}.{key}"):
            raise ModelError(
                f"{where} has {family}.{key}, which is not supported: take the model's safetensors"
            )
    config = {ours: _count(metadata, f"{family}.{key}", where) for ours, key in COUNTS.items()}
    heads = config["num_attention_heads"]
    width = _width(metadata, family, config["hidden_size"] // heads, where)
    windowed = _window(metadata, family) is not None
    kind, name = MISTRAL if family == "llama" and windowed else CLASSES[family]
    few = _count(metadata, f"{family}.attention.head_count_kv", where, heads)
    return config | {
        "model_type": kind,
        "architectures": [name],
        "num_key_value_heads": few,
        "rms_norm_eps": _epsilon(metadata, f"{family}.attention.layer_norm_rms_epsilon", where),
        "vocab_size": _rows(header, where),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope_parameters(header, family, width, source, file),
        **{f"{o}_token_id": metadata.get(f"tokenizer.ggml.{k}_token_id") for o, k in IDS.items()},
        **_own(header, family, config, width),
    }


def end_tokens(header: GgufHeader) -> list[int]:
    """Every id that ends a turn, the usual one first."""
    found = [header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ENDS]
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _own(header: GgufHeader, family: str, config: Mapping[str, int], width: int) -> dict[str, Any]:
    """What one family has and others have not."""
    metadata, window = header.metadata, _window(header.metadata, family)
    values: dict[str, Any] = {} if family == "phi3" else {"head_dim": width}
    if window is not None and family in WINDOWED:
        values |= {"sliding_window": window}
    elif family == "llama":
        values |= {
            "attention_bias": "blk.0.attn_output.bias" in header.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        }
    start = metadata.get("phi3.rope.scaling.original_context_length")
    if family == "phi3" and type(start) is int and start > 0:
        values |= {"original_max_position_embeddings": start}
    if family in LARGEST:
        large = config["num_hidden_layers"] == LARGEST[family]
        scale = config["hidden_size"] // config["num_attention_heads"] if large else width
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        said = {key: metadata[f"{family}.{key}"] for key in caps if f"{family}.{key}" in metadata}
        values |= {"query_pre_attn_scalar": scale} | said
    return values


def _window(metadata: Mapping[str, Any], family: str) -> int | None:
    """Tokens that a layer with a window reads; None where the file tells none."""
    window = metadata.get(f"{family}.attention.sliding_window")
    return window if type(window) is int and window > 0 else None


def _count(metadata: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if isinstance(value, list):
        raise ModelError(
            f"{where} has a different {key} in each layer, which is not supported: take the "
            "model's safetensors"
        )
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): fetch it again")
    return value


def _epsilon(metadata: Mapping[str, Any], key: str, where: str) -> float:
    value = metadata.get(key)
    if type(value) is not float or not 0 <= value < 1:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): fetch it again")
    return value


def _width(metadata: Mapping[str, Any], family: str, usual: int, where: str) -> int:
    """Numbers of an attention head, in keys and values alike."""
    known = f"{family}.attention.key_length"
    key = known if known in metadata or family != "llama" else "llama.rope.dimension_count"
    width = _count(metadata, key, where, max(usual, 1))
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
