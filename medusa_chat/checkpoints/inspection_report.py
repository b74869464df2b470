"""The report of an inspection: what was found in a checkpoint, for a person and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from medusa_chat.checkpoints.kept_copies import root
from medusa_chat.checkpoints.layouts.heads_file import HeadsFile
from medusa_chat.checkpoints.memory_needs import Estimate
from medusa_chat.units import gb, number

CONVERTED = 2  # bytes of a weight of a GGUF file once converted
LM_HEADS = {
    "own": "an LM head each",
    "one": "one LM head of their own for all",
    "shared": "the backbone's LM head",
}


@dataclass(frozen=True)
class Inspection:
    """What was found. backbone: the id or folder that the heads need, None for unknown; is_here:
    whether it can be loaded without a download. memory: by precision, for `context` tokens and a
    tree of `nodes`; empty where the backbone's config is not in reach. problems: what stands in
    the way, each with its remedy. stored: the type of most weights where it is a GGUF file.
    usual_context: tokens of a load where nobody says."""

    name: str
    heads: HeadsFile | None
    adapter: str | None
    backbone: str | None
    is_here: bool
    backbone_bytes: int
    parameters: int
    family: str
    context: int
    nodes: int
    memory: dict[str, Estimate]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    stored: str = ""
    usual_context: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values; the names of single tensors are left out."""
        values = asdict(self)
        if self.heads is not None:
            del values["heads"]["tensors"]
            values["heads"]["words"] = self.heads.words
        for precision, parts in self.memory.items():
            values["memory"][precision]["total"] = parts.total
        return values

    def lines(self) -> Iterator[str]:
        """A report for a person."""
        yield self.name
        yield from (f"  {what:<9} {text}" for what, text in self._facts())
        yield from (f"  note      {note}" for note in self.notes)
        yield from (f"  problem   {problem}" for problem in self.problems)
        if not self.problems:
            yield "  no problems found"

    def _facts(self) -> Iterator[tuple[str, str]]:
        if (heads := self.heads) is not None:
            yield "layout", f"{heads.layout}: {heads.words}"
            yield "heads", _in_words(heads)
            yield "files", f"{', '.join(heads.files)} ({gb(heads.bytes)} of heads)"
        elif not self.problems:
            yield "heads", "none: it decodes with prompt-lookup"
        if self.stored:
            size = gb(CONVERTED * self.parameters)
            yield "disk", f"converted once to 16 bits: {size} in {root('gguf')}"
        if self.adapter:
            yield "adapter", f"{self.adapter}, merged into the backbone at load"
        if self.backbone:
            yield "backbone", self._backbone()
        for precision, parts in self.memory.items():
            yield precision, f"{gb(parts.total)} ({_parts(parts)})"

    def _backbone(self) -> str:
        facts = [self.backbone or ""]
        if self.family:
            facts.append(f"{self.family}, {number(self.parameters)} parameters")
        if self.stored:
            facts.append(f"GGUF {self.stored}")
        facts.append(f"here, {gb(self.backbone_bytes)}" if self.is_here else "not on this disk")
        return ": ".join((facts[0], ", ".join(facts[1:])))


def _in_words(heads: HeadsFile) -> str:
    layers = f"{heads.layers} layer{'' if heads.layers == 1 else 's'}"
    rows = f", {heads.vocabulary} tokens" if heads.vocabulary else ""
    bias = "" if heads.bias else ", no bias"
    bias += ", which also read the root token" if heads.root else ""
    return (
        f"{heads.heads} of {layers}{bias}, {LM_HEADS[heads.lm]}, hidden {heads.hidden}{rows}, "
        f"{heads.dtype}"
    )


def _parts(parts: Estimate) -> str:
    return ", ".join(f"{name} {gb(count)}" for name, count in asdict(parts).items() if count)
