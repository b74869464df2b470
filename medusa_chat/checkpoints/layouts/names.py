"""Which tensor of a file is which part of the Medusa heads, told by its name and shape.

Every tool wrote its own names. They are mapped to the reference's: `{head}.{layer}.linear.weight`
and `.bias`, `{head}.{layers}.weight` for a head's own LM head; to our own `{head}.root.weight` for
heads that read the root; and to two of vLLM's:
`lm_head.weight` for one LM head of all heads, `token_map` for a shortened vocabulary.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from medusa_chat.checkpoints.layouts.entry import Entry
from medusa_chat.errors import ModelError

ONE_LM_HEAD = "lm_head.weight"
TOKEN_MAP = "token_map"
PREFIX = re.compile(r"^(?:base_model\.model\.)?(?:model\.)?(medusa_heads?)\.")
NUMBER = "([0-9]{1,3})"
# (who writes it, what it is, its name after the prefix)
PATTERNS = tuple(
    (style, kind, re.compile(f"^{pattern.replace('#', NUMBER)}$"))
    for style, kind, pattern in (
        ("medusa", "weight", r"#\.#\.linear\.weight"),
        ("medusa", "bias", r"#\.#\.linear\.bias"),
        ("medusa", "plain", r"#\.#\.weight"),  # a layer or an LM head: the shape tells
        ("medusa", "bias", r"#\.#\.bias"),
        ("medusa", "root", r"#\.root\.weight"),  # ours
        ("tensorrt", "weight", r"#\.medusa_layers\.#\.linear\.weight"),
        ("tensorrt", "bias", r"#\.medusa_layers\.#\.linear\.bias"),
        ("tensorrt", "lm", r"#\.lm_head\.weight"),
        ("vllm", "weight", r"blocks\.#\.layers\.#\.(?:linear\.)?weight"),
        ("vllm", "bias", r"blocks\.#\.layers\.#\.(?:linear\.)?bias"),
        ("vllm", "lm", r"lm_heads\.#\.weight"),
        ("vllm", "one lm", r"lm_head\.weight"),
        ("vllm", "map", r"token_map"),
    )
)
SCALES = re.compile(r"(weight_scale|input_scale|weight_scale_inv|_amax|weight_quantizer\..*)$")


@dataclass(frozen=True)
class Part:
    """What one tensor is. layer: -1 for what has none."""

    style: str
    kind: str
    head: int
    layer: int


def prefix_of(name: str) -> str:
    """ "medusa_head", "medusa_heads" or ""."""
    match = PREFIX.match(name)
    return match[1] if match else ""


def part_of(name: str) -> Part | None:
    """What a tensor of this name is in a file of heads, None when it is no part of them."""
    bare = PREFIX.sub("", name)
    for style, kind, pattern in PATTERNS:
        if match := pattern.match(bare):
            numbers = [int(n) for n in match.groups()]
            return Part(style, kind, *[*numbers, -1, -1][:2])
    return None


def are_heads(names: Iterable[str]) -> bool:
    """Whether a file with these tensors holds Medusa heads and nothing else."""
    parts = [part_of(name) for name in names]
    return all(parts) and any(part and part.head >= 0 for part in parts)


def canonical(header: Mapping[str, Entry], where: str) -> tuple[str, dict[str, str]]:
    """Who wrote the names, and canonical name -> name in the file. Raises ModelError for a tensor
    that is no part of heads, for two namings in one file, and for a part that is there twice."""
    parts: dict[str, Part] = {}
    for name in header:
        part = part_of(name)
        if part is None:
            raise ModelError(_unknown(name, where))
        parts[name] = part
    styles = sorted({part.style for part in parts.values()})
    if not styles:
        raise ModelError(f"{where} holds no tensors: fetch it again")
    if len(styles) > 1:
        raise ModelError(
            f"{where} mixes the names of {' and '.join(styles)} heads: use a file "
            "written by one tool"
        )
    names: dict[str, str] = {}
    for name, part in parts.items():
        mapped = _canonical(part, header[name].shape)
        if mapped in names:
            raise ModelError(
                f"{where} holds {names[mapped]!r} and {name!r}, which are the same part: use a "
                "file written by one tool"
            )
        names[mapped] = name
    return styles[0], names


def _unknown(name: str, where: str) -> str:
    if SCALES.search(name):
        return (
            f"{where} holds quantised heads ({name[:80]!r} is a scale): FP8 and other quantised "
            "heads cannot be used, take the 16-bit ones"
        )
    return (
        f"{where} holds the unexpected tensor {name[:80]!r}: it is not a file of Medusa heads that "
        "medusa-chat knows; give one with names like 0.0.linear.weight"
    )


def _canonical(part: Part, shape: tuple[int, ...]) -> str:
    """Own LM heads are "{head}.lm" here: how many layers stand before them is known later."""
    if part.kind == "root":
        return f"{part.head}.root.weight"
    if part.kind in ("weight", "bias"):
        return f"{part.head}.{part.layer}.linear.{part.kind}"
    if part.kind == "plain":
        is_square = len(shape) == 2 and shape[0] == shape[1]
        return f"{part.head}.{part.layer}.{'linear.weight' if is_square else 'lm'}"
    if part.kind == "lm":
        return f"{part.head}.*.lm"
    return ONE_LM_HEAD if part.kind == "one lm" else TOKEN_MAP
