"""HeadsFile: the Medusa heads in a file, recognised by the names and shapes of its tensors.

Each tool has its own tensor names. They are mapped to those of the reference implementation:
`{head}.{layer}.linear.weight` and `.bias`, `{head}.{layers}.weight` for a head's own LM head; to
`{head}.root.weight` (ours) for heads that read the root; and to two of vLLM's: `lm_head.weight`
for one LM head that all heads share, `token_map` for a shortened vocabulary.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from medusa_chat.checkpoints.layouts.headers import Entry
from medusa_chat.errors import ModelError

LAYOUTS = {
    "A": "heads alone, each with an LM head of its own",
    "B": "heads alone that share the backbone's LM head (version 2)",
    "C": "a whole model with its heads in the same weights (Medusa-2)",
    "D": "heads whose layers are one layer repeated",
    "E": "heads as vLLM writes them",
    "F": "heads as ModelOpt and TensorRT-LLM write them",
    "G": "heads alone in a file that is named like a whole model",
    "H": "a whole model with its heads in the same weights and a medusa_config",
    "I": "heads with a LoRA adapter for the backbone",
    "J": "heads without layers: LM heads only",
}


@dataclass(frozen=True)
class HeadsFile:
    """The heads of a checkpoint, before any values are read.

    is_whole: they are in the weights of their own backbone, which was trained together with them.
    root: the heads read the root, the token that is certain when they draft. tensors: canonical
    name -> (file, name in it). lm: the LM head: "own" for each head, "one" for all heads together,
    or "shared" with the backbone. vocabulary: rows of own LM heads, otherwise None; with
    is_truncated they are a part of a larger vocabulary, listed in a token map. bytes: on disk.
    base: the backbone that the config names. disagreements: one sentence for each difference
    between config and file; the file counts.
    """

    layout: str
    files: tuple[str, ...]
    is_whole: bool
    tensors: Mapping[str, tuple[str, str]]
    heads: int
    layers: int
    bias: bool
    lm: Literal["own", "one", "shared"]
    root: bool
    dtype: str
    hidden: int
    vocabulary: int | None
    is_truncated: bool
    parameters: int
    bytes: int
    base: str | None = None
    disagreements: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The layout in words."""
        return LAYOUTS[self.layout]

    def first(self, heads: int) -> "HeadsFile":
        """Only the first `heads` heads, for a tree of that depth, or all if there are not more;
        with their parameters and bytes."""
        if heads >= self.heads:
            return self
        kept = {n: place for n, place in self.tensors.items() if head_of(n) < heads}
        share = self.hidden * (self.layers * (self.hidden + self.bias) + self.hidden * self.root)
        share += self.hidden * (self.vocabulary or 0) if self.lm == "own" else 0
        less = share * (self.heads - heads)
        size = self.bytes // self.parameters
        return replace(
            self,
            tensors=kept,
            heads=heads,
            parameters=self.parameters - less,
            bytes=self.bytes - less * size,
        )


def head_of(name: str) -> int:
    """The head that a canonical tensor belongs to; -1 for one that all heads share."""
    return -1 if name in (ONE_LM_HEAD, TOKEN_MAP) else int(name.partition(".")[0])


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
    """What one tensor is. layer: -1 where there is none."""

    style: str
    kind: str
    head: int
    layer: int


def prefix_of(name: str) -> str:
    """ "medusa_head", "medusa_heads" or ""."""
    match = PREFIX.match(name)
    return match[1] if match else ""


def part_of(name: str) -> Part | None:
    """What a tensor of this name is in a file of heads, None when it is not part of heads."""
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
    """The tool that wrote the names, and canonical name -> name in the file. Raises ModelError for
    a tensor that is not part of heads, for names of two tools in one file, and for duplicates."""
    parts: dict[str, Part] = {}
    for name in header:
        part = part_of(name)
        if part is None:
            raise ModelError(_unknown(name, where))
        parts[name] = part
    styles = sorted({part.style for part in parts.values()})
    if not styles:
        raise ModelError(f"{where} holds no tensors: download it again")
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
    """Own LM heads are "{head}.lm" here: the number of layers before them is known later."""
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


MAX_HEADS = 16
MAX_LAYERS = 16
MAX_HIDDEN = 65_536
MAX_VOCABULARY = 2_000_000
FLOATS = ("F16", "BF16", "F32")
Entries = Mapping[str, Entry]  # name -> tensor


def read_heads(files: Mapping[str, Entries], where: str, whole: bool) -> HeadsFile:
    """The heads in these tensors (file -> header). whole: they are in the weights of a
    whole model. Raises ModelError, naming what is wrong."""
    header = {name: entry for entries in files.values() for name, entry in entries.items()}
    place = {name: file for file, entries in files.items() for name in entries}
    style, names = canonical(header, where)
    entries = {mapped: header[name] for mapped, name in names.items()}
    _refuse_numbers(entries, names, where)
    heads, layers = _count(entries, where)
    entries = {_with_layers(name, layers, where): entry for name, entry in entries.items()}
    names = {_with_layers(mapped, layers, where): name for mapped, name in names.items()}
    hidden, vocabulary = _measure(entries, names, heads, layers, where)
    own = f"0.{layers}.weight" in entries
    floats = [entry for name, entry in entries.items() if name != TOKEN_MAP]
    dtypes = sorted({entry.dtype for entry in floats})
    return HeadsFile(
        layout=_layout(style, header, entries, layers, whole, next(iter(files))),
        files=tuple(files),
        is_whole=whole,
        tensors={mapped: (place[name], name) for mapped, name in names.items()},
        heads=heads,
        layers=layers,
        bias=any(name.endswith(".bias") for name in entries),
        root="0.root.weight" in entries,
        lm="own" if own else "one" if ONE_LM_HEAD in entries else "shared",
        dtype="+".join(dtypes),
        hidden=hidden,
        vocabulary=vocabulary,
        is_truncated=TOKEN_MAP in entries,
        parameters=sum(entry.numel for entry in floats),
        bytes=sum(entry.bytes for entry in entries.values()),
    )


def _refuse_numbers(entries: Entries, names: Mapping[str, str], where: str) -> None:
    for mapped, entry in entries.items():
        allowed = ("I64", "I32") if mapped == TOKEN_MAP else FLOATS
        if entry.dtype not in allowed:
            what = "FP8" if entry.dtype.startswith("F8") else entry.dtype
            raise ModelError(
                f"{where}: tensor {names[mapped]!r} is {what}, which cannot be used: take heads in "
                "fp16, bf16 or fp32"
            )


def _count(entries: Entries, where: str) -> tuple[int, int]:
    """(number of heads, number of layers). Raises ModelError for gaps and uneven heads."""
    layers: dict[int, set[int]] = {}
    for name in entries:
        if (head := head_of(name)) >= 0:
            numbers = layers.setdefault(head, set())
            if name.endswith(".linear.weight"):
                numbers.add(int(name.split(".")[1]))
    _refuse_gaps(set(layers), "heads", MAX_HEADS, where)
    for name in entries:
        if name.endswith(".bias") and name.replace(".bias", ".weight") not in entries:
            raise ModelError(f"{where} is incomplete: {name} has no weight; download it again")
    counts = {len(numbers) for numbers in layers.values()}
    for numbers in layers.values():
        if numbers:
            _refuse_gaps(numbers, "layers", MAX_LAYERS, where)
    if len(counts) != 1:
        raise ModelError(
            f"{where} is incomplete: its heads have {', '.join(map(str, sorted(counts)))} layers; "
            "download it again"
        )
    return len(layers), counts.pop()


def _refuse_gaps(numbers: set[int], what: str, most: int, where: str) -> None:
    if not numbers:
        raise ModelError(f"{where} holds no Medusa heads: give a file that does")
    if len(numbers) > most or max(numbers) >= 10 * most:
        raise ModelError(f"{where} has {what} up to number {max(numbers)}: 1 to {most} are allowed")
    missing = set(range(max(numbers) + 1)) - numbers
    if missing:
        raise ModelError(
            f"{where} is incomplete: number {min(missing)} of {what} 0 to {max(numbers)} is "
            "missing; download it again"
        )


def _with_layers(name: str, layers: int, where: str) -> str:
    """`{head}.{i}.lm` becomes `{head}.{layers}.weight`; i must be the number of layers."""
    head, index, part = (name.split(".") + ["", ""])[:3]
    if part != "lm":
        return name
    if index not in ("*", str(layers)):
        raise ModelError(
            f"{where} is incomplete: the LM head of head {head} is at {index} after "
            f"{layers} layers; download it again"
        )
    return f"{head}.{layers}.weight"


def _measure(
    entries: Entries, names: Mapping[str, str], heads: int, layers: int, where: str
) -> tuple[int, int | None]:
    """(hidden size, rows of the LM heads). Raises ModelError for tensors of other shapes."""
    roots = [name for name in entries if name.endswith(".root.weight")]
    if roots and len(roots) != heads:
        raise ModelError(
            f"{where} is incomplete: {len(roots)} of {heads} heads read the root; download it again"
        )
    first = entries.get("0.0.linear.weight") or entries.get("0.0.weight")
    lm_heads = [n for n in (f"{h}.{layers}.weight" for h in range(heads)) if n in entries]
    lm = entries.get(lm_heads[0] if lm_heads else ONE_LM_HEAD)
    if lm_heads and (len(lm_heads) != heads or ONE_LM_HEAD in entries):
        raise ModelError(
            f"{where} is incomplete: {len(lm_heads)} of {heads} heads have an LM head of their "
            "own; download it again"
        )
    shape = first.shape if first else ()
    hidden = shape[-1] if len(shape) == 2 else 0
    rows = lm.shape[0] if lm and lm.shape else None
    if not 1 <= hidden <= MAX_HIDDEN or (rows is not None and not 1 <= rows <= MAX_VOCABULARY):
        raise ModelError(
            f"{where}: hidden size {hidden} or {rows} tokens is out of range: download it again"
        )
    if TOKEN_MAP in entries and rows is None:
        raise ModelError(f"{where} has a token map and no LM head: download it again")
    for name, entry in entries.items():
        expected = _shape(name, hidden, rows)
        if entry.shape != expected:
            raise ModelError(
                f"{where}: tensor {names[name]!r} is {entry.shape}, not {expected}; "
                "download it again"
            )
    return hidden, rows


def _shape(name: str, hidden: int, rows: int | None) -> tuple[int | None, ...]:
    if name.endswith((".linear.weight", ".root.weight")):
        return (hidden, hidden)
    if name.endswith(".linear.bias"):
        return (hidden,)
    return (rows,) if name == TOKEN_MAP else (rows, hidden)


def _layout(
    style: str, header: Entries, entries: Entries, layers: int, whole: bool, file: str
) -> str:
    """The letter of the layout; H and I are decided later, from the files beside it."""
    if style != "medusa":
        return "E" if style == "vllm" else "F"
    if whole:
        return "F" if "medusa_heads" in {prefix_of(name) for name in header} else "C"
    if layers == 0:
        return "J"
    weights = [e.key for name, e in entries.items() if name.endswith(".linear.weight")]
    if len(set(weights)) < len(weights):
        return "D"
    if file.rpartition("/")[2].startswith("model"):
        return "G"
    return "A" if f"0.{layers}.weight" in entries else "B"
