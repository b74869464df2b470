"""fetch(): a load's checkpoint and backbone, downloaded from the Hub where they are not here."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace

from medusa_chat import hub
from medusa_chat.checkpoints.locate import Checkpoint, SurveyedFolder
from medusa_chat.checkpoints.places import folder_or_repo
from medusa_chat.checkpoints.shipped_heads import explaining_backbone
from medusa_chat.messages import LoadPhase, LoadRequest

Downloads = Generator[tuple[LoadPhase, None], None, Checkpoint]


def fetch(request: LoadRequest) -> Downloads:
    """Bring the checkpoint and its base into the cache and return where they lie: one "download"
    for each piece of news, none where all is here. Closing it ends the download within a second;
    what has come is kept.

    Raises HubError, and ModelError for a checkpoint that is broken or names no base.
    """
    repo = folder_or_repo(request.checkpoint)
    if isinstance(repo, str) and _must_download(repo, request):
        yield from _pulled(hub.plan(repo, backbone=request.backbone))
    surveyed = SurveyedFolder.of(request, offline=True)
    base = surveyed.backbone
    if isinstance(base, str) and _must_download(base, request):
        with explaining_backbone(request.checkpoint):
            part, _ = hub.plan_repo(base, role="backbone")
        yield from _pulled(hub.DownloadPlan(base, (part,), None, hub.free_bytes()))
    return surveyed.locate()


def _must_download(repo: str, request: LoadRequest) -> bool:
    """Whether it is missing and may be downloaded; offline, what is missing is refused later."""
    return not (request.offline or hub.is_offline() or hub.cached_folder(repo))


def _pulled(plan: hub.DownloadPlan) -> Iterator[tuple[LoadPhase, None]]:
    """What is whole in the cache is used as it is: `models pull` brings what is newer."""
    parts = tuple(part for part in plan.parts if not hub.cached_folder(part.name))
    note = "; ".join(filter(None, (part.note for part in parts)))
    with closing(hub.pull(replace(plan, parts=parts))) as events:
        for event in events:
            figures = event.done, event.total, event.speed or 0.0
            yield LoadPhase("download", None, *figures, note), None
