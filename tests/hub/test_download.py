"""Downloads: room on the disk, cancelling, resuming, speed."""

import threading
from pathlib import Path

import pytest
from support.downloads import big, fetch, refusal
from support.hub_files import (
    BASE,
    MB,
    WHOLE,
)
from support.hub_server import Fault, Hub

from medusa_chat import hub


def test_a_disk_without_room_is_said_before(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.download_plan, "_free_bytes", lambda: 1000)
    plan = hub.plan(BASE)
    before = server.sent
    refusal("disk", r"needs 3\d\d kB.*has 1 kB.*models rm", lambda: fetch(plan))
    assert server.sent == before


def test_a_folder_that_cannot_be_made_is_said(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    refusal("disk", "cannot write to.*HF_HOME", lambda: fetch(hub.plan(BASE)))


@pytest.mark.parametrize("kind", ["slow", "stall"])
@pytest.mark.parametrize("how", ["close", "stop"])
def test_cancel_wakes_the_read_and_keeps_what_came(
    server: Hub, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    # A read that is not woken lasts longer than any wait of this test.
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 3600)
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", kind, after=MB, rate=1000)]
    stop = threading.Event()
    events = hub.pull(plan, stop)
    for event in events:
        if event.done >= MB and event.file == name:
            break
    if how == "close":
        events.close()
    else:
        stop.set()
        assert [event.phase for event in events][-1] == "cancelled"
    for thread in threading.enumerate():
        if thread.name == "download":
            thread.join(60)
            assert not thread.is_alive(), "the read was not woken"
    assert hub.find(BASE) is None
    server.faults = []
    again = hub.plan(BASE)
    assert again.left <= plan.left - MB
    assert fetch(again)[-1].done == again.left


def test_a_file_that_another_process_downloads_is_left_to_it(server: Hub) -> None:
    from filelock import FileLock

    plan = hub.plan(WHOLE)
    file = plan.parts[0].files[-1]
    folder = hub.cache.cache_folder() / ".locks" / hub.cache.storage(WHOLE).name
    folder.mkdir(parents=True)
    with FileLock(folder / f"{file.blob}.lock"):
        refusal("busy", "another process", lambda: fetch(plan))
    assert fetch(hub.plan(WHOLE))[-1].phase == "done"


def test_events_add_up_and_tell_a_speed(server: Hub) -> None:
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "slow", rate=2 * MB)]
    events = fetch(plan)
    assert all(a.done <= b.done for a, b in zip(events, events[1:], strict=False))
    timed = [event for event in events if event.speed]
    assert timed and all(event.left_seconds >= 0 for event in timed)
    assert all(0 < event.speed < 8 * MB for event in timed)
