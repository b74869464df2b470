"""Inspection: what a checkpoint is, what it needs and what is wrong with it; reads no weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from medusa_chat import hub
from medusa_chat.checkpoints.layouts.contents import Contents, backbone_of, place_in, survey
from medusa_chat.checkpoints.layouts.drafter_file import DrafterFile
from medusa_chat.checkpoints.layouts.drafters import drafter_in
from medusa_chat.checkpoints.layouts.folders import BackboneFiles
from medusa_chat.checkpoints.layouts.heads_file import HeadsFile
from medusa_chat.checkpoints.layouts.lora import CONFIG, lora_settings
from medusa_chat.checkpoints.layouts.source import MAX_JSON, LocalFolder, Source
from medusa_chat.checkpoints.machine import PLAIN_CPU, Cpu
from medusa_chat.checkpoints.memory_needs import (
    Estimate,
    automatic_precision,
    estimates,
    has_int8,
    measured,
)
from medusa_chat.checkpoints.model_sizes import LONGEST, sizes
from medusa_chat.checkpoints.places import is_folder, is_gguf_file, is_here, open_here
from medusa_chat.checkpoints.shipped_heads import shipped_heads
from medusa_chat.decoding.families import refuse_unfit
from medusa_chat.errors import ModelError
from medusa_chat.gguf_files import split_name
from medusa_chat.hub.catalog import known_drafters, model_preset
from medusa_chat.messages import DeviceMemory, LoadRequest
from medusa_chat.trees.calibration import CALIBRATION_FILE, Calibration
from medusa_chat.units import gb, number

LM_HEADS = {
    "own": "an LM head each",
    "one": "one LM head of their own for all",
    "shared": "the backbone's LM head",
}


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds. backbone: the id or folder that the heads need, None for unknown;
    is_here: whether it can be loaded without a download. memory: by precision, for `context` tokens
    and a tree of `nodes`; empty where the backbone's config is not in reach. problems: what would
    stop a load, each with its remedy. stored: what the types of a GGUF file are called.
    usual_context: the default context of a load, in tokens. auto: the precision that a load takes
    by itself on this machine, empty where that was not asked or none fits. measured: by precision
    what was measured of it on such a device, in words. drafter: what it is, where it is a drafter
    without a model. drafters: known ones of the backbone, in words."""

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
    auto: str = ""
    measured: Mapping[str, str] = field(default_factory=dict)
    drafter: str = ""
    drafters: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values; the names of single tensors are left out."""
        values = asdict(self)
        if self.heads is not None:
            del values["heads"]["tensors"]
            values["heads"]["words"] = self.heads.words
        for precision, parts in self.memory.items():
            values["memory"][precision] |= {"total": parts.total, "peak": parts.peak}
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
        elif self.drafter:
            yield "drafter", self.drafter
        elif not self.problems:
            yield "heads", "none: it decodes with prompt-lookup"
        if self.adapter:
            yield "adapter", f"{self.adapter}, merged into the backbone at load"
        if self.backbone:
            yield "backbone", self._backbone()
        for precision, parts in self.memory.items():
            yield precision, "; ".join(filter(None, (parts.words, self.measured.get(precision))))
        if self.drafters:
            yield "drafters", f"{', '.join(self.drafters)}: give one as --draft"
        if self.auto:
            yield "auto", f"takes {self.auto} on this machine"

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


PRECISIONS = ("fp32", "bf16", "fp16", "int8", "nf4")
NODES = 64
PADDING = 1024
UNREAD = (
    "only configs and the headers of weights were read, of what is not on this disk: tokenizer, "
    "heads and tensors are looked at when they are"
)


def inspect(
    name: str,
    backbone: str | None = None,
    context: int | None = None,
    open_source: Callable[[str], Source] = open_here,
    device: str = "cuda",
    cpu: Cpu = PLAIN_CPU,
    dry_load: Callable[[LoadRequest], None] | None = None,
    machine: DeviceMemory | None = None,
) -> Inspection:
    """Look at a checkpoint and at the backbone it needs.

    open_source: a folder or id -> its files; it raises ModelError for what is out of reach. device,
    cpu: what memory is estimated for; machine: what `auto` is chosen for. dry_load: raises
    ModelError for what a load would refuse, by the load's own readers; called where all files are
    on this disk and nothing is wrong by their headers. Raises ModelError only when the checkpoint
    itself cannot be opened; all else becomes a problem of the report."""
    source = open_source(name)
    report = _nothing_of(name, context)
    try:
        if (drafter := drafter_in(source)) is not None:
            return _of_drafter(report, drafter)
        found = survey(source)
    except ModelError as error:
        return replace(report, problems=(str(error),))
    said = found.heads.disagreements if found.heads else ()
    report = replace(report, heads=found.heads, adapter=found.adapter, notes=(*found.notes, *said))
    if backbone and (why := found.refuses_backbone):
        return _with(report, f"{name} {why}")
    where = backbone or _own_backbone(name, found)
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
    adapter = found.adapter if where != name else None
    report = _with(report, *_refused(source, files, adapter))
    report = replace(report, drafters=tuple(f"{d.id} ({d.kind})" for d in known_drafters(where)))
    report = _with_shipped(report, files, place) if where == name else report
    is_local = isinstance(source, LocalFolder) and isinstance(place, LocalFolder)
    report = _with_backbone(report, files, isinstance(place, LocalFolder), context, device, cpu)
    if machine is not None:
        report = _with_choice(report, machine, cpu)
    if dry_load is None or report.problems:
        return report
    if not is_local:
        return replace(report, notes=(*report.notes, UNREAD))
    try:
        dry_load(LoadRequest(name, backbone))
    except ModelError as error:
        return _with(report, str(error))
    return report


def _of_drafter(report: Inspection, drafter: DrafterFile) -> Inspection:
    """The report of what is no model: first how it is used, then what it takes."""
    said = f"it {drafter.use}", f"it takes {drafter.cost}"
    return replace(report, drafter=drafter.words, notes=said)


def _with_choice(report: Inspection, machine: DeviceMemory, cpu: Cpu) -> Inspection:
    """The report with what a load takes by itself on this machine, and what was measured."""
    is_ours = has_int8(machine, cpu)
    said = {precision: measured(precision, machine.device, is_ours) for precision in report.memory}
    return replace(
        report,
        auto=automatic_precision(report.memory, machine, cpu, report.stored),
        measured={precision: words for precision, words in said.items() if words},
    )


def _nothing_of(name: str, context: int | None) -> Inspection:
    return Inspection(
        name, None, None, None, False, 0, 0, "", context or LONGEST, NODES, {}, (), ()
    )


def _own_backbone(name: str, found: Contents) -> str | None:
    """The checkpoint itself, or its base: of that a preset knows better than a config."""
    preset = model_preset(name)
    return name if found.backbone else (preset and preset.base) or found.base


def _refused(source: Source, files: BackboneFiles, adapter: str | None) -> Iterator[str]:
    """Why a load would refuse the calibration beside the heads, the adapter, or the backbone's
    family, by their configs."""
    try:
        _refuse_calibration(source)
        if adapter is not None:
            folder, slash, _ = adapter.rpartition("/")
            lora_settings(source, f"{folder}{slash}{CONFIG}")
        refuse_unfit(SimpleNamespace(**files.config))
    except ModelError as error:
        yield str(error)


def _with_shipped(report: Inspection, files: BackboneFiles, place: Source) -> Inspection:
    """The report with the heads that come with medusa-chat, where the model has none of its own."""
    if report.heads is not None or report.adapter is not None:
        return report
    where = place_in(place.folder, files) if isinstance(place, LocalFolder) else None
    found = shipped_heads(report.name, files.config, where)
    if found is None:
        return report
    return replace(report, heads=found.heads, notes=(*report.notes, found.note))


def _refuse_calibration(source: Source) -> None:
    """Raises ModelError for a calibration beside the heads that a load would refuse."""
    if CALIBRATION_FILE in source.files():
        text = source.read(CALIBRATION_FILE, 0, MAX_JSON)
        Calibration.parse(text, f"{source.name}/{CALIBRATION_FILE}")


def open_anywhere(name: str) -> Source:
    """A folder or GGUF file of this disk, "demo", or a Hub repo: read by ranges, or from the cache
    where the network is not to be used or not there. Raises ModelError."""
    if is_here(name) or not hub.is_repo_id(split_name(name)[0]) or hub.is_offline():
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
            if is_folder(place) or is_gguf_file(place):
                return str(place.resolve())
    return base


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
    except ModelError as error:  # a family that is refused may call its numbers otherwise
        return report if report.problems else _with(report, str(error))
    asked = min(context or size.context, size.positions)
    is_adapted = report.adapter is not None
    report = replace(
        report,
        notes=(*report.notes, *files.notes),
        stored=files.stored,
        is_here=is_local and not files.missing,
        backbone_bytes=files.bytes,
        parameters=size.parameters,
        family=str(files.config.get("model_type"))[:60],
        context=asked,
        usual_context=size.context,
        memory=estimates(files, report.heads, asked, NODES, device, cpu, is_adapted),
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
        yield f"{report.backbone} lacks {files.missing[0]}: it is incomplete, download it again"
    if not files.has_tokenizer:
        yield f"{report.backbone} holds no tokenizer: it is incomplete"
