"""fetch(): finds the checkpoint and backbone of a load, and downloads what is missing."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from medusa_chat import hub
from medusa_chat.checkpoints.layouts.contents import backbone_of
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.checkpoints.locate import Checkpoint, News, SurveyedFolder
from medusa_chat.checkpoints.places import folder_or_repo, from_hub
from medusa_chat.checkpoints.shipped_heads import explaining_backbone
from medusa_chat.decoding.families import refuse_unfit
from medusa_chat.messages import LoadPhase, LoadRequest


def fetch(request: LoadRequest, needs_tokenizer: bool = True) -> Generator[News, None, Checkpoint]:
    """Download the checkpoint and its base into the cache if needed, and return where they are.
    Yields a "download" phase for each progress report, none if everything is cached. Closing the
    generator ends the download within a second; the bytes so far are kept.

    needs_tokenizer: whether a base without one is refused.

    Raises HubError, and ModelError for a checkpoint that is broken or names no base.
    """
    is_offline = request.offline or hub.is_offline()
    with_base = partial(hub.plan, backbone=request.backbone)
    place = yield from _available(folder_or_repo(request.checkpoint), with_base, is_offline)
    surveyed = SurveyedFolder.of(request, place)
    with explaining_backbone(surveyed.preset):
        base = yield from _available(surveyed.backbone, _backbone_plan, is_offline)
    return surveyed.locate(base, needs_tokenizer)


def fetch_files(
    name: str, is_offline: bool, require: Callable[[Source], None]
) -> Generator[News, None, Path]:
    """The folder or GGUF file that a name means, whatever is in it, downloaded if it is missing;
    yields and raises as `fetch` does. require: raises ModelError, by headers and config, for files
    that are not to be downloaded."""

    def refuse(needs: hub.DownloadPlan) -> None:
        for part in needs.parts if needs.refusal is None else ():
            require(hub.HubSource(part.name, part.revision))

    place, is_offline = folder_or_repo(name), is_offline or hub.is_offline()
    return (yield from _available(place, _backbone_plan, is_offline, refuse))


def _available(
    place: Path | str,
    plan: Callable[[str], hub.DownloadPlan],
    is_offline: bool,
    require: Callable[[hub.DownloadPlan], None] | None = None,
) -> Generator[News, None, Path]:
    """A local folder or GGUF file unchanged; that of a Hub id, downloaded if it is missing.
    require: raises ModelError for what is not to be downloaded; None: what does not decode."""
    if isinstance(place, Path):
        return place
    if not is_offline and hub.cached_folder(place) is None:
        needs = plan(place)
        (require or require_decodable)(needs)
        yield from _download(needs)
    return from_hub(place)


def require_decodable(needs: hub.DownloadPlan) -> None:
    """Raises ModelError, before anything is downloaded, for a model that a load would refuse by its
    config or its GGUF header."""
    if needs.refusal is None:
        for part in needs.parts:
            backbone = backbone_of(hub.HubSource(part.name, part.revision))
            if backbone is not None:
                refuse_unfit(SimpleNamespace(**backbone.config))


def _backbone_plan(repo: str) -> hub.DownloadPlan:
    return hub.DownloadPlan(repo, (hub.plan_repo(repo, role="backbone"),))


def _download(plan: hub.DownloadPlan) -> Iterator[News]:
    """Download the missing parts; `models pull` updates those that are complete in the cache."""
    parts = tuple(part for part in plan.parts if not hub.cached_folder(part.name))
    note = "; ".join(filter(None, (part.note for part in parts)))
    with closing(hub.pull(replace(plan, parts=parts))) as events:
        for event in events:
            figures = event.done, event.total, event.speed or 0.0
            yield LoadPhase("download", None, *figures, note), None
