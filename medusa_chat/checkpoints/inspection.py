"""Inspection: what a checkpoint is, what it needs, and what is wrong with it; no weight is read."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from medusa_chat import hub
from medusa_chat.checkpoints.cpu import PLAIN_CPU, Cpu
from medusa_chat.checkpoints.layouts.contents import Contents, backbone_of, survey
from medusa_chat.checkpoints.layouts.folders import BackboneFiles
from medusa_chat.checkpoints.layouts.heads_file import HeadsFile
from medusa_chat.checkpoints.layouts.source import LocalFolder, Source
from medusa_chat.checkpoints.locate import open_here
from medusa_chat.checkpoints.memory_estimate import Estimate, estimate, sizes
from medusa_chat.errors import ModelError
from medusa_chat.units import gb, number

PRECISIONS = ("fp32", "fp16", "int8", "nf4")
NODES = 64
CONTEXT = 8192
PADDING = 1024
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
    the way, each with its remedy."""

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
        facts.append(f"here, {gb(self.backbone_bytes)}" if self.is_here else "not on this disk")
        return ": ".join((facts[0], ", ".join(facts[1:])))


def _in_words(heads: HeadsFile) -> str:
    layers = f"{heads.layers} layer{'' if heads.layers == 1 else 's'}"
    rows = f", {heads.vocabulary} tokens" if heads.vocabulary else ""
    bias = "" if heads.bias else ", no bias"
    return (
        f"{heads.heads} of {layers}{bias}, {LM_HEADS[heads.lm]}, hidden {heads.hidden}{rows}, "
        f"{heads.dtype}"
    )


def _parts(parts: Estimate) -> str:
    return ", ".join(f"{name} {gb(count)}" for name, count in asdict(parts).items() if count)


def inspect(
    name: str,
    backbone: str | None = None,
    context: int | None = None,
    open_source: Callable[[str], Source] = open_here,
    device: str = "cuda",
    cpu: Cpu = PLAIN_CPU,
) -> Inspection:
    """Look at a checkpoint and at the backbone it needs. open_source: a folder or id -> its
    files; it raises ModelError for what is out of reach. device, cpu: what memory is estimated
    for. Raises ModelError only when the checkpoint itself cannot be opened; all else becomes a
    problem of the report."""
    source = open_source(name)
    report = Inspection(
        *(name, None, None, None, False, 0, 0, "", context or CONTEXT, NODES, {}, (), ())
    )
    try:
        found = survey(source)
    except ModelError as error:
        return replace(report, problems=(str(error),))
    said = found.heads.disagreements if found.heads else ()
    report = replace(report, heads=found.heads, adapter=found.adapter, notes=(*found.notes, *said))
    where = backbone or (name if found.backbone else found.base)
    if backbone and found.is_whole:
        return _with(report, f"{name} holds its own backbone: leave --backbone out")
    if where is None:
        return _with(report, _names_none(found))
    report = replace(report, backbone=where)
    try:
        place = source if where == name else open_source(_beside(source, where))
    except ModelError as error:
        return replace(report, notes=(*report.notes, f"the backbone cannot be read: {error}"))
    try:
        files = found.backbone if where == name else backbone_of(place)
    except ModelError as error:
        return _with(report, str(error))
    if files is None:
        return _with(report, f"{where} holds no model: give another --backbone")
    here = isinstance(place, LocalFolder)
    return _with_backbone(report, files, here, context, device, cpu)


def open_anywhere(name: str) -> Source:
    """A folder of this disk, "demo", or a Hub repo: read by ranges, or from the cache where the
    network is not to be used or not there. Raises ModelError."""
    if Path(name).expanduser().is_dir() or name == "demo" or not hub.is_repo_id(name):
        return open_here(name)
    if hub.is_offline():
        return open_here(name)
    try:
        return hub.HubSource(name)
    except hub.HubError as error:
        if error.kind not in ("network", "offline", "busy"):
            raise
        try:
            return open_here(name)
        except ModelError:
            raise error from None


def _with(report: Inspection, *problems: str) -> Inspection:
    return replace(report, problems=(*report.problems, *problems))


def _names_none(found: Contents) -> str:
    if found.heads is None:
        return "it holds neither Medusa heads nor a model: give another folder or id"
    hidden = found.heads.hidden
    return f"it does not name a backbone: give --backbone ID|DIR, a model of hidden size {hidden}"


def _beside(source: Source, base: str) -> str:
    """A folder that the checkpoint names relative to itself, else the name as it is."""
    if isinstance(source, LocalFolder):
        for place in (source.folder / base, source.folder.parent / base):
            if _is_folder(place):
                return str(place.resolve())
    return base


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _with_backbone(
    report: Inspection,
    files: BackboneFiles,
    is_local: bool,
    context: int | None,
    device: str,
    cpu: Cpu,
) -> Inspection:
    try:
        size = sizes(files.config)
    except ModelError as error:
        return _with(report, str(error))
    asked = min(context or CONTEXT, size.positions)
    report = replace(
        report,
        is_here=is_local and not files.missing,
        backbone_bytes=files.bytes,
        parameters=size.parameters,
        family=str(files.config.get("model_type"))[:60],
        context=asked,
        memory={
            p: estimate(files.config, report.heads, p, asked, NODES, device, cpu)
            for p in PRECISIONS
        },
    )
    return _with(report, *_misfits(report, files, size.hidden, size.vocabulary))


def _misfits(
    report: Inspection, files: BackboneFiles, hidden: int, vocabulary: int
) -> Iterator[str]:
    heads = report.heads
    if heads is not None and heads.hidden != hidden:
        yield f"the heads are for hidden size {heads.hidden} and the backbone has {hidden}"
    rows = heads.vocabulary if heads is not None and not heads.is_truncated else None
    if rows is not None and not vocabulary <= rows < vocabulary + PADDING:
        yield f"the heads are for {rows} tokens and the backbone has {vocabulary}"
    if files.missing:
        yield f"{report.backbone} lacks {files.missing[0]}: it is incomplete, fetch it again"
    if not files.has_tokenizer:
        yield f"{report.backbone} holds no tokenizer: it is incomplete"
