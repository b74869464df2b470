"""fetch(): a load's checkpoint and backbone, downloaded from the Hub where they are not here."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from medusa_chat import hub
from medusa_chat.checkpoints.layouts.contents import backbone_of
from medusa_chat.checkpoints.locate import Checkpoint, News, SurveyedFolder
from medusa_chat.checkpoints.places import folder_or_repo, from_hub
from medusa_chat.checkpoints.shipped_heads import explaining_backbone
from medusa_chat.decoding.families import refuse_unfit
from medusa_chat.messages import LoadPhase, LoadRequest


def fetch(request: LoadRequest) -> Generator[News, None, Checkpoint]:
    """Bring the checkpoint and its base into the cache and return where they lie: one "download"
    for each piece of news, none where all is here. Closing it ends the download within a second;
    what has come is kept.

    Raises HubError, and ModelError for a checkpoint that is broken or names no base.
    """
    is_offline = request.offline or hub.is_offline()
    with_base = partial(hub.plan, backbone=request.backbone)
    place = yield from _brought(folder_or_repo(request.checkpoint), with_base, is_offline)
    surveyed = SurveyedFolder.of(request, place)
    with explaining_backbone(surveyed.preset):
        base = yield from _brought(surveyed.backbone, _backbone_plan, is_offline)
    return surveyed.locate(base)


def _brought(
    place: Path | str, plan: Callable[[str], hub.DownloadPlan], is_offline: bool
) -> Generator[News, None, Path]:
    """A folder or a GGUF file as it is; the one of a Hub id, downloaded where it is missing."""
    if isinstance(place, Path):
        return place
    if not is_offline and hub.cached_folder(place) is None:
        needs = plan(place)
        require_decodable(needs)
        yield from _pulled(needs)
    return from_hub(place)


def require_decodable(needs: hub.DownloadPlan) -> None:
    """Raises ModelError, before the first byte is fetched, for a model that a load would refuse by
    its config or its GGUF header."""
    if needs.refusal is None:
        for part in needs.parts:
            backbone = backbone_of(hub.HubSource(part.name, part.revision))
            if backbone is not None:
                refuse_unfit(SimpleNamespace(**backbone.config))


def _backbone_plan(repo: str) -> hub.DownloadPlan:
    return hub.DownloadPlan(repo, (hub.plan_repo(repo, role="backbone"),))


def _pulled(plan: hub.DownloadPlan) -> Iterator[News]:
    """What is whole in the cache is used as it is: `models pull` brings what is newer."""
    parts = tuple(part for part in plan.parts if not hub.cached_folder(part.name))
    note = "; ".join(filter(None, (part.note for part in parts)))
    with closing(hub.pull(replace(plan, parts=parts))) as events:
        for event in events:
            figures = event.done, event.total, event.speed or 0.0
            yield LoadPhase("download", None, *figures, note), None
