"""fetch(): what a load needs from the Hub is downloaded before anything is read."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from medusa_chat.checkpoints.locate import base_needed, place_of
from medusa_chat.messages import LoadPhase, LoadRequest

if TYPE_CHECKING:
    from medusa_chat.hub import DownloadPlan


def fetch(request: LoadRequest) -> Iterator[LoadPhase]:
    """Bring the checkpoint and its base into the cache: a "download" for each piece of news, none
    where all is here. Closing it ends the download within a second; what has come is kept.
    Raises HubError, and ModelError for a checkpoint that is broken or names no base."""
    repo = place_of(request.checkpoint)
    if isinstance(repo, str) and _is_lacking(repo, request):
        from medusa_chat import hub

        yield from _pulled(hub.plan(repo, backbone=request.backbone))
    base = base_needed(request)
    if base is not None and _is_lacking(base, request):
        from medusa_chat import hub

        part, _ = hub.plan_repo(base, role="backbone")
        yield from _pulled(hub.DownloadPlan(base, (part,), None, hub.free_bytes()))


def _is_lacking(repo: str, request: LoadRequest) -> bool:
    """Whether it is to be fetched: without the network what is not here is refused later."""
    from medusa_chat import hub

    return not (request.offline or hub.is_offline() or hub.cached_folder(repo))


def _pulled(plan: "DownloadPlan") -> Iterator[LoadPhase]:
    """What is whole in the cache is used as it is: `models pull` brings what is newer."""
    from medusa_chat import hub

    parts = tuple(part for part in plan.parts if not hub.cached_folder(part.id))
    with closing(hub.pull(replace(plan, parts=parts))) as events:
        for event in events:
            yield LoadPhase("download", None, event.done, event.total, event.speed or 0.0)
