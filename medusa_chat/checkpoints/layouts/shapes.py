"""Works out the heads that a file holds from the shapes of its tensors; refuses what is amiss."""

from collections.abc import Mapping

from medusa_chat.checkpoints.layouts.entry import Entry
from medusa_chat.checkpoints.layouts.heads_file import HeadsFile, head_of
from medusa_chat.checkpoints.layouts.names import ONE_LM_HEAD, TOKEN_MAP, canonical, prefix_of
from medusa_chat.errors import ModelError

MAX_HEADS = 16
MAX_LAYERS = 16
MAX_HIDDEN = 65_536
MAX_VOCABULARY = 2_000_000
FLOATS = ("F16", "BF16", "F32")
Entries = Mapping[str, Entry]  # name -> tensor


def read_heads(files: Mapping[str, Entries], where: str, whole: bool) -> HeadsFile:
    """Work out the heads that the given tensors (file -> header) make. whole: they lie in the
    weights of a whole model. Raises ModelError, naming what is wrong."""
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
    """Heads and layers; every head has as many layers, and no number is left out."""
    layers: dict[int, set[int]] = {}
    for name in entries:
        if (head := head_of(name)) >= 0:
            found = layers.setdefault(head, set())
            if name.endswith(".linear.weight"):
                found.add(int(name.split(".")[1]))
    _refuse_gaps(set(layers), "heads", MAX_HEADS, where)
    for name in entries:
        if name.endswith(".bias") and name.replace(".bias", ".weight") not in entries:
            raise ModelError(f"{where} is incomplete: {name} has no weight; fetch it again")
    counts = {len(found) for found in layers.values()}
    for found in layers.values():
        if found:
            _refuse_gaps(found, "layers", MAX_LAYERS, where)
    if len(counts) != 1:
        raise ModelError(
            f"{where} is incomplete: its heads have {', '.join(map(str, sorted(counts)))} layers; "
            "fetch it again"
        )
    return len(layers), counts.pop()


def _refuse_gaps(found: set[int], what: str, most: int, where: str) -> None:
    if not found:
        raise ModelError(f"{where} holds no Medusa heads: give a file that does")
    if len(found) > most or max(found) >= 10 * most:
        raise ModelError(f"{where} has {what} up to number {max(found)}: 1 to {most} are allowed")
    missing = set(range(max(found) + 1)) - found
    if missing:
        raise ModelError(
            f"{where} is incomplete: of {what} 0 to {max(found)} number {min(missing)} is missing; "
            "fetch it again"
        )


def _with_layers(name: str, layers: int, where: str) -> str:
    """`{head}.{i}.lm` becomes `{head}.{layers}.weight`; i must be the number of layers."""
    head, index, part = (name.split(".") + ["", ""])[:3]
    if part != "lm":
        return name
    if index not in ("*", str(layers)):
        raise ModelError(
            f"{where} is incomplete: the LM head of head {head} is at {index} after "
            f"{layers} layers; fetch it again"
        )
    return f"{head}.{layers}.weight"


def _measure(
    entries: Entries, names: Mapping[str, str], heads: int, layers: int, where: str
) -> tuple[int, int | None]:
    """Hidden size and rows of the LM heads; every tensor has the shape that they ask for."""
    roots = [name for name in entries if name.endswith(".root.weight")]
    if roots and len(roots) != heads:
        raise ModelError(
            f"{where} is incomplete: {len(roots)} of {heads} heads read the root; fetch it again"
        )
    first = entries.get("0.0.linear.weight") or entries.get("0.0.weight")
    lm_heads = [n for n in (f"{h}.{layers}.weight" for h in range(heads)) if n in entries]
    lm = entries.get(lm_heads[0] if lm_heads else ONE_LM_HEAD)
    if lm_heads and (len(lm_heads) != heads or ONE_LM_HEAD in entries):
        raise ModelError(
            f"{where} is incomplete: {len(lm_heads)} of {heads} heads have an LM head of their "
            "own; fetch it again"
        )
    shape = first.shape if first else ()
    hidden = shape[-1] if len(shape) == 2 else 0
    rows = lm.shape[0] if lm and lm.shape else None
    if not 1 <= hidden <= MAX_HIDDEN or (rows is not None and not 1 <= rows <= MAX_VOCABULARY):
        raise ModelError(
            f"{where}: hidden size {hidden} or {rows} tokens is out of range: fetch it again"
        )
    if TOKEN_MAP in entries and rows is None:
        raise ModelError(f"{where} has a token map and no LM head: fetch it again")
    for name, entry in entries.items():
        expected = _shape(name, hidden, rows)
        if entry.shape != expected:
            raise ModelError(
                f"{where}: tensor {names[name]!r} is {entry.shape}, not {expected}; fetch it again"
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
    """The letter of the layout, by its first file too; H and I are known from what lies beside."""
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
