"""Downloads from the test Hub: run one, begin a large one, and read how one was refused."""

from typing import Any

import pytest

from medusa_chat import hub
from support.hub_files import (
    BASE,
    MB,
    SHARD,
    weights,
)
from support.hub_server import Hub


def fetch(plan: hub.DownloadPlan, **options: Any) -> list[hub.DownloadEvent]:
    return list(hub.pull(plan, **options))


def refusal(kind: str, match: str, call: Any) -> hub.HubError:
    """The refusal of call(): one line, exit code 4."""
    with pytest.raises(hub.HubError, match=match) as caught:
        call()
    error = caught.value
    assert error.kind == kind and error.exit_code == 4
    assert "\n" not in str(error) and len(str(error)) < 400
    return error


def blobs(repo: str) -> dict[str, int]:
    folder = hub.cache.storage(repo) / "blobs"
    return {file.name: file.stat().st_size for file in folder.iterdir()} if folder.exists() else {}


def big(server: Hub, size: int = 3 * MB) -> tuple[str, hub.DownloadPlan]:
    """A plan whose first shard is large; its name."""
    server.repos[BASE].files[SHARD] = weights(size, 9)
    return SHARD, hub.plan(BASE)
