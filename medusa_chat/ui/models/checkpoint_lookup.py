"""What is found about one checkpoint without loading it, on this disk or on the Hub. No gradio."""

from dataclasses import dataclass
from typing import NamedTuple

from medusa_chat import hub
from medusa_chat.checkpoints.inspection import Inspection, inspect, open_anywhere
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.checkpoints.licence import licence_of
from medusa_chat.checkpoints.memory_needs import Cpu
from medusa_chat.checkpoints.places import open_here
from medusa_chat.errors import MedusaChatError
from medusa_chat.ui.models.load_form import is_hub_name

EVERY_CONTEXT = 10**9  # more than any model has: the report is made for all that it can read
GONE = ("network", "busy")  # kinds of HubError: the Hub itself cannot be asked
NOT_ASKED = (*GONE, "offline")


class CheckpointKey(NamedTuple):
    """What is looked up: "demo", a folder or a Hub id, with the backbone to use for its heads."""

    name: str
    backbone: str | None = None


class MemoryTarget(NamedTuple):
    """What memory is estimated for."""

    device: str = "cpu"
    cpu: Cpu = Cpu()


CPU = MemoryTarget()


@dataclass(frozen=True)
class Detail:
    """What was found about a checkpoint without loading it.

    report: for the longest context it can read; None where it could not be looked at. needs: the
    download, None where nothing has to be asked. error: why it cannot be loaded, one line with its
    remedy; link: a page for that. kind: of the HubError.
    """

    report: Inspection | None = None
    needs: hub.DownloadPlan | None = None
    licence: str = ""
    error: str = ""
    link: str = ""
    kind: str = ""

    @property
    def left(self) -> int | None:
        """Bytes to download; None while that is not known."""
        if self.needs is not None:
            return self.needs.left
        return 0 if self.report is not None and self.report.is_here else None


def look_up(key: CheckpointKey, is_online: bool, target: MemoryTarget = CPU) -> Detail:
    """Look at a checkpoint: on this disk where it is whole there, else on the Hub."""
    try:
        report = inspect(key.name, key.backbone, EVERY_CONTEXT, open_here, *target)
        if report.is_here or not is_online or not _is_of_hub(key.name, report):
            return Detail(report, error=_problem(report))
    except MedusaChatError as error:
        if not _is_of_hub(key.name) or hub.is_offline():
            return _refused(error)
        if not is_online:
            why = "the Hub could not be reached a minute ago"
            return _refused(hub.HubError(f"{key.name} is not on this disk, and {why}", "network"))
    try:
        return _look_up_there(key, target)
    except MedusaChatError as error:
        return _refused(error)


def _look_up_there(key: CheckpointKey, target: MemoryTarget) -> Detail:
    opened: dict[str, Source] = {}

    def opening(name: str) -> Source:
        opened[name] = open_anywhere(name)
        return opened[name]

    needs = hub.plan(key.name, None, key.backbone) if is_hub_name(key.name) else None
    if needs is not None and needs.refusal is not None and needs.refusal.kind != "disk":
        return _refused(needs.refusal, needs)  # closed: there is nothing to look at yet
    base = key.backbone or (needs.base if needs else None)
    report = inspect(key.name, base, EVERY_CONTEXT, opening, *target)
    if needs is None and report.backbone and is_hub_name(report.backbone):
        needs = hub.plan(report.backbone)
    licence = next(filter(None, map(licence_of, opened.values())), "")
    refusal = needs.refusal if needs else None
    if refusal is not None:
        return _refused(refusal, needs, report, licence)
    return Detail(report, needs, licence, error=_problem(report))


def _refused(
    error: MedusaChatError,
    needs: hub.DownloadPlan | None = None,
    report: Inspection | None = None,
    licence: str = "",
) -> Detail:
    link, kind = getattr(error, "link", ""), getattr(error, "kind", "")
    return Detail(report, needs, licence, str(error), link, kind)


def _is_of_hub(name: str, report: Inspection | None = None) -> bool:
    """Whether something of it is on the Hub: the checkpoint, or the base of local heads."""
    if report is not None and report.backbone and not report.is_here:
        return is_hub_name(report.backbone)
    return name != "demo" and is_hub_name(name)


def _problem(report: Inspection) -> str:
    """Why it cannot be loaded as a model; empty where it can."""
    return next(iter(report.problems), report.notes[0] if report.drafter else "")
