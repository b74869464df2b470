"""Small GGUF files: a random model of a family as llama.cpp's converter would write it.

Names come from gguf's own tables and layouts from llama.cpp's convert_hf_to_gguf.py, so that they
are independent of what is tested. The tokenizer is one of bytes.
"""

import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

from medusa_chat.checkpoints import kept_copies
from support.checkpoints import TEMPLATE
from support.gguf_families import (
    LLAMAS,
    NAMES,
    as_deepseek2,
    as_gemma4,
    as_gpt_oss,
    as_published,
    own_keys,
    tiny_of,
)

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*ALPHABET, "he", "<|im_start|>", "<|im_end|>", "<pad>"]
BOS, END, PAD = 257, 258, 259
ROWS = len(TOKENS)
PRE = "gpt-2"  # how text is split
# types that gguf cannot write: the halves at these places of a block are its scales
PACKED = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "IQ4_XS": (0,)}


def tiny_model(family: str = "llama", **changes: Any) -> Any:
    """A random model whose vocabulary is that of the files."""
    values = {"vocab_size": ROWS, "max_position_embeddings": 256, "intermediate_size": 64}
    values = {"initializer_range": 0.2} | values | changes
    model = tiny_of(family, values)
    with torch.no_grad():
        for one in model.state_dict().values():
            if one.dim() == 1:  # norms, scales and biases, else they are ones and zeros
                one += 0.1 * torch.randn(one.shape)
    return model


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    template: str | None = TEMPLATE,
    sentencepiece: bool = False,
    split: int = 0,
    is_first_small: bool = False,
    family: str = "",
    tokens: Mapping[int, tuple[str, int]] | None = None,
    without: tuple[str, ...] = (),
    **more: Any,
) -> Path:
    """Write a model; where it lies. kind: type of the matrices; more: further metadata, by its key.
    family: its name in the file, where it is not that of the model. tokens: id -> (text, kind), in
    place of those that the vocabulary has there. without: keys that are left out.
    split: tensors of a part of a split file, of which the first may have none."""
    config = model.config
    name = family or NAMES.get(config.model_type, config.model_type)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split, small_first_shard=is_first_small)
    _add_sizes(writer, name, config)
    kinds = {"gemma4": _add_gemma4}
    add_tokenizer = _add_sentencepiece if sentencepiece else kinds.get(name, _add_tokenizer)
    add_tokenizer(writer, template)
    for number, (word, kind_of_token) in (tokens or {}).items():
        _value(writer, "tokens")[number] = word
        _value(writer, "token_type")[number] = kind_of_token
    for key, value in more.items():
        key = key.replace("__", ".")
        kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        kinds |= {bool: writer.add_bool, list: writer.add_array}
        kinds[type(value)](key, value)
    for key in without:
        writer.kv_data[0].pop(key, None)
    for place, tensor in tensors_of(model, name).items():
        _add(writer, place, tensor, kind if tensor.ndim > 1 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name(f"{path.stem}-00001-of-{len(writer.tensors):05d}.gguf") if split else path


def _value(writer: gguf.GGUFWriter, name: str) -> list[Any]:
    values: list[Any] = writer.kv_data[0][f"tokenizer.ggml.{name}"].value
    return values


def tensors_of(model: Any, name: str) -> Mapping[str, np.ndarray]:
    """The tensors as the file holds them, in fp32."""
    config = model.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    state = model.state_dict().items()
    own = {"gpt-oss": as_gpt_oss, "gemma4": as_gemma4, "deepseek2": partial(as_deepseek2, config)}
    published = own.get(name, as_published)
    for key, tensor in (one for pair in state for one in published(*pair)):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        place = key if key.startswith("blk.") else table.get_name(key, (".weight", ".bias"))
        assert place is not None, key
        if name in LLAMAS and ("attn_q." in place or "attn_k." in place):
            heads = config.num_attention_heads
            heads = config.num_key_value_heads if "attn_k." in place else heads
            tensor = permuted(tensor, heads)
        if name in ("gemma", "gemma2", "gemma3") and place.endswith("norm.weight"):
            tensor = tensor + 1
        found[place] = tensor.float().numpy()
    if name == "gemma4":
        found["rope_freqs.weight"] = gemma4_factors(config)
    return found


def gemma4_factors(config: Any) -> np.ndarray:
    """Gemma4Model.generate_extra_tensors: only a part of a head's pairs is turned."""
    whole = config.layer_types.index("full_attention")
    pairs = config.per_layer_config[whole].head_dim // 2
    turned = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: str) -> None:
    chosen = gguf.GGMLQuantizationType[kind]
    if kind in PACKED:
        blocks = _random_blocks(tensor, chosen)
    elif kind == "F32":
        blocks = tensor
    else:
        blocks = gguf.quantize(tensor, chosen)
    writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=chosen)


def _random_blocks(tensor: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    weights, length = gguf.GGML_QUANT_SIZES[kind]
    count = tensor.size // weights
    generator = np.random.default_rng(count)
    blocks = generator.integers(0, 256, (count, length), dtype=np.uint8)
    for place in PACKED[kind.name]:
        scales = generator.uniform(1e-4, 1e-3, (count, 1)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(*tensor.shape[:-1], -1)


def _add_sizes(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    config, whole = config.per_layer_config[0], config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(f"tiny {name}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if name in ("command-r", "cohere2"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    is_half = name in ("glm4", "glm4moe", "minimax-m2")
    writer.add_rope_dimension_count(width // 2 if is_half else width)
    if width * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(width)
        writer.add_value_length(width)
    own_keys(writer, name, whole)


def _add_sentencepiece(writer: gguf.GGUFWriter, template: str | None) -> None:
    """As files of Llama 2 have it: scores, a token for each byte, and no merges."""
    few = ["h", "e", "he", "\u2581", "\u2581he", "l", "o", "lo"]
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *few,
        *(f"<0x{byte:02X}>" for byte in range(ROWS - 3 - len(few))),
    ]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_scores([-float(n) for n in range(ROWS)])
    writer.add_token_types([2, 3, 3] + [1] * len(few) + [6] * (ROWS - 3 - len(few)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    if template is not None:
        writer.add_chat_template(template)


def _add_gemma4(writer: gguf.GGUFWriter, template: str | None) -> None:
    """As Gemma4Model.set_vocab: merges as well as a token for each byte."""
    marks, turn = ["<pad>", "<eos>", "<bos>", "<unk>"], ["<|turn>", "<turn|>"]
    few = ["\u2581", "h", "e", "he", "\u2581he"]
    count = ROWS - len(marks + few + turn)
    words = [*marks, *few, *(f"<0x{byte:02X}>" for byte in range(count)), *turn]
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(words)
    writer.add_token_scores([-1000.0] * ROWS)
    writer.add_token_types([3] * 4 + [1] * len(few) + [6] * count + [3, 4])
    writer.add_token_merges(["h e", "\u2581 he"])
    for add, number in (
        *((writer.add_pad_token_id, 0), (writer.add_eos_token_id, 1)),
        *((writer.add_bos_token_id, 2), (writer.add_unk_token_id, 3)),
    ):
        add(number)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    if template is not None:
        writer.add_chat_template(template)


def _add_tokenizer(writer: gguf.GGUFWriter, template: str | None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list([*TOKENS])
    writer.add_token_types([1] * BOS + [3] * (ROWS - BOS))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(PAD)
    if template is not None:
        writer.add_chat_template(template)


# Files that are wrong in one place.


def raw_gguf(
    pairs: Mapping[str, tuple[int, bytes]],
    tensors: Mapping[str, tuple[tuple[int, ...], int, int]],
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file byte by byte. pairs: key -> (type, value); tensors: name -> (dimensions as the file
    has them, type, offset); counts: of tensors and keys, where they lie."""
    told = counts or (len(tensors), len(pairs))
    whole = b"GGUF" + struct.pack("<IQQ", version, *told)
    for key, (kind, value) in pairs.items():
        whole += text(key) + struct.pack("<I", kind) + value
    for name, (dimensions, kind, offset) in tensors.items():
        sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        whole += text(name) + sizes + struct.pack("<IQ", kind, offset)
    return whole + bytes(-len(whole) % 32) + data


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A text with its length before it, or with another."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def texts(values: list[str], count: int | None = None) -> tuple[int, bytes]:
    """An array of texts, or one that claims another count."""
    told = struct.pack("<IQ", 8, len(values) if count is None else count)
    return 9, told + b"".join(map(text, values))


def old_copy(path: Path) -> Path:
    """What an earlier version would have converted a file to."""
    folder = kept_copies.place(kept_copies.OLD, [], [path])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with kept_copies.writing(folder, kept_copies.Origin(str(path), str(path), "bf16")) as partial:
        (partial / "model.safetensors").write_bytes(bytes(2000))
    return folder
