"""Settings files: refuses values that would make another library fail or never finish."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from medusa_chat.checkpoints.layouts.source import LocalFolder, Source, read_json
from medusa_chat.errors import ModelError

OBJECTS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.json"),
)
MAX_TOKENIZER = 256_000_000  # bytes; the largest known has 35 MB
MAX_COUNT = 2**48  # smaller counts may be refused for lack of memory
COUNTS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")  # not null
OBJECTS_INSIDE = ("rope_parameters", "rope_scaling", "text_config", "quantization_config")
MAX_EXPERTS = 1_000_000  # also the largest width of an expert
SHORTEST_CONTEXT = 16
MAX_ENDS = 1000  # end tokens: every step checks for each
MAX_ADDED = 100_000  # added tokens: reading them takes quadratic time
MAX_GROWTH = 64  # how many times longer a tokenizer's replacements may make a text
MAX_STEPS = 1000  # of one normalizer or decoder


def refuse_odd_settings(
    source: Source, folder: str, names: Sequence[str], config: Mapping[str, Any]
) -> None:
    """Refuse invalid values in the settings files of a model's folder. names: the files that exist;
    config: the content of config.json, the only one checked in a Hub repo. Raises ModelError."""
    there = [name for name in OBJECTS if name in names]
    if not isinstance(source, LocalFolder):
        there = there[:1]
    for name in there:
        path = f"{folder}/{name}" if folder else name
        where = f"{source.name}/{path}"
        if name == "tokenizer.json":
            _refuse_tokenizer(read_json(source, path, MAX_TOKENIZER), where)
        else:
            _refuse(name, config if name == "config.json" else read_json(source, path), where)


def _refuse(name: str, values: Mapping[str, Any], where: str) -> None:
    if name == "config.json":
        refuse_odd_config(values, where)
        for part in (values, values.get("text_config") or {}):
            refuse_unread(part, where)
    if "eos_token_id" in values:
        _refuse_ends(values["eos_token_id"], where)
    for key in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
        _refuse_many(values.get(key), MAX_ADDED, f"{where} has {key}")
    if name == "added_tokens.json":
        _refuse_many(values, MAX_ADDED, f"{where} has added tokens")
    if values.get("compile_config") is not None and not isinstance(values["compile_config"], dict):
        raise ModelError(f"{where} has no valid compile_config: download it again")


def refuse_odd_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that are out of range, and values of a wrong type."""
    inner = config.get("text_config") or {}
    whole = config if inner else None  # its own numbers are not those of the text part
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in OBJECTS_INSIDE:
            if not isinstance(part.get(key), dict | None):
                raise ModelError(f"{where} has no valid {key}: download it again")
        for key in COUNTS:
            value = part.get(key)
            is_left_open = value is None and (key not in part or key not in NEEDED or part is whole)
            if not is_left_open and (type(value) is not int or not 1 <= value <= MAX_COUNT):
                raise ModelError(
                    f"{where} has no valid {key} ({str(value)[:40]}): download it again"
                )
        heads, few = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if heads is not None and few is not None and heads % few:
            raise ModelError(
                f"{where} has {heads} attention heads, not a multiple of its {few} key-value "
                "heads: download it again"
            )
        _refuse_layers(part, where)


def _refuse_layers(part: Mapping[str, Any], where: str) -> None:
    for key in ("num_experts", "num_local_experts", "moe_intermediate_size"):
        value = part.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= MAX_EXPERTS):
            raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): download it again")
    window, kinds = part.get("sliding_window"), part.get("layer_types")
    if window is not None and (type(window) is not int or not -1 <= window <= MAX_COUNT):
        raise ModelError(
            f"{where} has no valid sliding_window ({str(window)[:40]}): download it again"
        )
    are_words = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    if kinds is not None and not are_words:
        raise ModelError(f"{where} has no valid layer_types: download it again")
    positions = part.get("max_position_embeddings")
    if positions is not None and positions < SHORTEST_CONTEXT:
        raise ModelError(
            f"{where} allows a context of {positions} tokens (max_position_embeddings): at least "
            f"{SHORTEST_CONTEXT} are needed"
        )


def _refuse_ends(ends: object, where: str) -> None:
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    _refuse_many(listed, MAX_ENDS, f"{where} has end tokens")
    if any(type(token) is not int or abs(token) > MAX_COUNT for token in listed):
        raise ModelError(f"{where} has no valid eos_token_id: download it again")


def _refuse_many(values: object, most: int, what: str) -> None:
    if isinstance(values, list | dict) and len(values) > most:
        raise ModelError(f"{what}, {len(values):,} of them: at most {most:,} are allowed")


def _refuse_tokenizer(values: Mapping[str, Any], where: str) -> None:
    _refuse_many(values.get("added_tokens"), MAX_ADDED, f"{where} has added tokens")
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        steps = list(_steps(values.get(part), f"the {part} of {where}"))
        growth = 1.0
        for step in steps:
            growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise ModelError(
                f"{where} has a {part} that makes a text up to {growth:.0g} times as long: it is "
                f"broken or malicious, {MAX_GROWTH} times are allowed"
            )


def _steps(part: object, where: str) -> Iterator[Mapping[str, Any]]:
    """Every step of a part, sequences flattened."""
    left, count = [part], 0
    while left:
        step = left.pop()
        count += 1
        if count > MAX_STEPS:
            raise ModelError(f"{where} has over {MAX_STEPS} steps: it is broken, download it again")
        if isinstance(step, dict):
            yield step
            for key in ("normalizers", "decoders", "pretokenizers", "processors"):
                if isinstance(step.get(key), list):
                    left += step[key]


def _growth(step: Mapping[str, Any]) -> float:
    """The factor by which a step may lengthen a text: Replace inserts its content at each match."""
    if step.get("type") != "Replace":
        return 1.0
    content, pattern = step.get("content"), step.get("pattern")
    put = len(content) if isinstance(content, str) else 0
    plain = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(plain, str) and plain:
        return max(1.0, put / len(plain))
    return 1.0 + put  # a regular expression may match every character, and between them


# quantisation methods that transformers reads with another package -> its module
PACKAGES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "auto-round": "auto_round",
    "compressed-tensors": "compressed_tensors",
    "torchao": "torchao",
    "aqlm": "aqlm",
    "hqq": "hqq",
    "quanto": "optimum.quanto",
    "eetq": "kernels",
    "higgs": "flute",
    "spqr": "spqr_quant",
    "vptq": "vptq",
    "quark": "quark",
}


def refuse_unread(config: Mapping[str, Any], where: str) -> None:
    """Raises ModelError for weights quantised by a method that cannot be read here."""
    quantisation = config.get("quantization_config") or {}
    method = quantisation.get("quant_method")
    if isinstance(config.get("quantization"), dict) and method is None:
        method = "MLX"
    elif not isinstance(method, str) or _is_there(PACKAGES.get(method)):
        return
    raise ModelError(
        f"{where}: the weights are quantised by {method}, which cannot be read here: use the model "
        "without quantisation, or a GGUF file of it"
    )


def _is_there(package: str | None) -> bool:
    if package is None:
        return True
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent package
        return False
