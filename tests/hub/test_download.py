"""The Hub, by the real huggingface_hub against a small server: what is asked, had, and refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints import layout_a_safetensors, write_checkpoint
from support.hub_files import (
    BASE,
    HEADS,
    MB,
    WHOLE,
    base_files,
    heads_files,
    shard,
    text,
    weights,
    whole_files,
)
from support.hub_server import Fault, Hub, HubRepo, commit

from medusa_chat import hub
from medusa_chat.checkpoints.inspection import inspect, open_anywhere
from medusa_chat.hub import cached_file

GATED = {"X-Error-Code": "GatedRepo"}


BASE_NEEDS = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    "model.safetensors.index.json",
}


def log_in(server: Hub, *repos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server.tokens["hf_secret"] = set(repos)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


def fetch(plan: hub.DownloadPlan, **options: Any) -> list[hub.DownloadEvent]:
    return list(hub.pull(plan, **options))


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client slept between two tries, on a clock that stands but for them."""
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(hub.client, "time", clock)
    return slept


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


# The plan.


def test_plan_of_heads_counts_the_base_in_one_format_to_the_byte(server: Hub) -> None:
    plan = hub.plan(HEADS)
    heads, base = plan.parts
    assert (heads.role, base.role, plan.base) == ("heads", "backbone", BASE)
    assert {f.file.name for f in heads.files} == {"config.json", "medusa_lm_head.safetensors"}
    assert {f.file.name for f in base.files} == BASE_NEEDS
    files = server.repos[BASE].files, server.repos[HEADS].files
    expected = sum(len(files[0][name]) for name in BASE_NEEDS)
    expected += sum(len(files[1][f.file.name]) for f in heads.files)
    assert plan.total == plan.left == expected
    assert plan.refusal is None and plan.fits and not plan.gated
    assert heads.sha == commit(server.repos[HEADS].files)


def test_bytes_sent_are_the_bytes_planned(server: Hub) -> None:
    plan = hub.plan(HEADS)
    before = server.sent
    events = fetch(plan)
    assert server.sent - before == plan.left == events[-1].done == events[-1].total
    assert [event.phase for event in events][-1] == "done"
    assert not server.leaks


def test_files_of_one_content_are_counted_and_fetched_once(server: Hub) -> None:
    server.repos[BASE].files["special_tokens_map.json"] = b"{}"  # as the generation config
    plan = hub.plan(BASE)
    assert plan.left == plan.total - 2
    before = server.sent
    assert fetch(plan)[-1].done == plan.left == server.sent - before
    assert (plan.parts[0].folder / "special_tokens_map.json").read_bytes() == b"{}"


def test_a_base_that_is_gone_is_told_and_not_fatal(server: Hub) -> None:
    del server.repos[BASE]
    plan = hub.plan(HEADS)
    assert plan.base is None and f"names the base {BASE}" in plan.notes[0]
    refusal("missing", "there is no", lambda: hub.plan(HEADS, backbone=BASE))


def test_a_whole_model_needs_no_base_and_its_pickles_where_nothing_else_is(server: Hub) -> None:
    plan = hub.plan(WHOLE)
    assert [part.role for part in plan.parts] == ["model"]
    assert {f.file.name for f in plan.parts[0].files} == set(whole_files())


def test_what_is_cached_is_not_counted(server: Hub) -> None:
    fetch(hub.plan(BASE))
    plan = hub.plan(HEADS)
    assert plan.parts[1].left == 0
    assert plan.left == plan.parts[0].left > 0
    fetch(plan)
    again = hub.plan(HEADS)
    assert again.left == 0 and again.total > 0


def test_another_backbone_replaces_the_base(server: Hub, tmp_path: Path) -> None:
    plan = hub.plan(HEADS, backbone=WHOLE)
    assert plan.base == WHOLE and plan.parts[1].id == WHOLE
    (tmp_path / "mine").mkdir()
    assert len(hub.plan(HEADS, backbone=str(tmp_path / "mine")).parts) == 1
    refusal("refused", "its own backbone", lambda: hub.plan(WHOLE, backbone=BASE))


@pytest.mark.parametrize("base", ["N/A", "/data/vicuna", "../x", "C:\\models", "a/b/c", "", None])
def test_a_config_that_names_no_repo_is_not_followed(server: Hub, base: Any) -> None:
    server.repos[HEADS].files = heads_files(base)
    plan = hub.plan(HEADS)
    assert len(plan.parts) == 1 and plan.base is None
    assert "--backbone" in plan.notes[0]


def test_heads_under_a_models_name_are_heads(server: Hub) -> None:
    config = text(base_model_name_or_path=BASE, medusa_num_heads=4)
    server.repos["x/4heads"] = HubRepo({"config.json": config, "model.safetensors": weights(5000)})
    server.repos["x/vllm"] = HubRepo(
        {"config.json": text(model_type="medusa"), "model.safetensors": weights(5000)}
    )
    assert [part.role for part in hub.plan("x/4heads").parts] == ["heads", "backbone"]
    assert [part.role for part in hub.plan("x/vllm").parts] == ["heads"]


def test_a_preset_pins_the_revision_and_knows_the_base(server: Hub) -> None:
    preset = "FasterDecoding/medusa-vicuna-7b-v1.3"
    pickled = {"config.json": text(medusa_num_heads=2), "medusa_lm_head.pt": weights(500)}
    safe = pickled | {"medusa_lm_head.safetensors": weights(400)}
    server.repos[preset] = HubRepo(pickled, revisions={"refs/pr/1": safe})
    server.repos["lmsys/vicuna-7b-v1.3"] = HubRepo(base_files())
    plan = hub.plan(preset)
    assert plan.base == "lmsys/vicuna-7b-v1.3" and plan.parts[0].sha == commit(safe)
    assert {f.file.name for f in plan.parts[0].files} == {
        "config.json",
        "medusa_lm_head.safetensors",
    }
    fetch(plan)
    assert hub.resolve(preset, offline=True).name == commit(safe)


@pytest.mark.parametrize(
    "files",
    [
        {"README.md": b"x"},
        {"model.Q4.gguf": b"x", "config.json": b"{}"},
        {"original/consolidated.00.pth": b"x", "config.json": text(model_type="llama")},
    ],
)
def test_a_repo_without_usable_weights_is_refused(server: Hub, files: dict[str, bytes]) -> None:
    server.repos["x/nothing"] = HubRepo(files)
    refusal("refused", "neither Medusa heads nor weights", lambda: hub.plan("x/nothing"))


def test_an_index_that_names_a_missing_shard_is_refused(server: Hub) -> None:
    del server.repos[BASE].files["model-00002-of-00002.safetensors"]
    refusal("broken", "lacks model-00002-of-00002", lambda: hub.plan(BASE))


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/evil.json", "a\\..\\b.json", "C:x.json"])
def test_file_names_that_leave_the_folder_are_refused(server: Hub, name: str) -> None:
    server.repos[BASE].files[name] = b"{}"
    refusal("broken", "makes no sense", lambda: hub.plan(BASE))


# Faults.


def test_a_typo_is_answered_with_the_right_name(server: Hub) -> None:
    refusal("missing", f"did you mean {HEADS}", lambda: hub.plan("someone/medusa-haeds"))
    refusal(
        "missing",
        "did you mean philschmid",
        lambda: hub.plan("philschmidt/llama-3-1-8b-instruct-medusa"),
    )
    refusal("missing", "hf auth login", lambda: hub.plan("nobody/nothing-at-all"))


def test_a_revision_that_is_not_there(server: Hub) -> None:
    refusal("missing", "no such revision", lambda: hub.plan(BASE, "refs/pr/9"))


@pytest.mark.parametrize("name", ["", "a/b/c", "a b/c", "../x", "a/..", "x" * 300, "a--b/c", "é/x"])
def test_names_that_are_no_ids_ask_nothing(server: Hub, name: str) -> None:
    refusal("missing", "no Hub id", lambda: hub.plan(name))
    assert not server.requests


def test_gated_is_said_with_the_link_before_a_byte_is_fetched(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repos[BASE].gated = "manual"
    plan = hub.plan(HEADS)
    assert plan.gated and plan.total > 0
    sent = server.sent
    error = refusal("gated", "accept its licence.*hf auth login", lambda: fetch(plan))
    assert error.link == f"{server.url}/{BASE}" and server.sent == sent
    log_in(server, monkeypatch=monkeypatch)
    error = refusal("gated", "accept its licence", lambda: fetch(hub.plan(HEADS)))
    assert "hf auth login" not in str(error) and "hf_secret" not in str(error)
    log_in(server, BASE, monkeypatch=monkeypatch)
    assert fetch(hub.plan(HEADS))[-1].phase == "done"
    assert not server.leaks, "the token went to another host"


def test_gated_heads_are_planned_by_their_names_alone(server: Hub) -> None:
    server.repos[HEADS].gated = "auto"
    plan = hub.plan(HEADS)
    assert plan.parts[0].role == "heads" and plan.refusal.kind == "gated"


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (Fault("/api/", "status", status=401), "refused", r"\(401\).*hf auth login"),
        (Fault("/api/", "status", status=403), "refused", r"\(403\).*settings/tokens"),
        (Fault("/api/", "status", status=404), "missing", "there is no someone/base"),
        (Fault("/api/", "status", status=429), "busy", r"wait 60 s \(429"),
        (
            Fault("/api/", "status", status=429, headers={"Retry-After": "300"}),
            *("busy", "wait 300 s"),
        ),
        (Fault("/api/", "status", status=500), "broken", r"trouble \(500\)"),
        (Fault("/api/", "status", status=418), "refused", r"\(418\)"),
        (Fault("/api/", "html"), "broken", "not the Hub.*HF_ENDPOINT"),
        (Fault("/api/", "hang"), "network", "does not answer.*--offline"),
        (Fault("resolve", "hang"), "network", "does not answer"),
    ],
)
def test_a_plan_that_fails_says_why_in_one_line_within_seconds(
    server: Hub,
    naps: list[float],
    fault: Fault,
    kind: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault.kind == "hang":
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    server.faults = [fault]
    refusal(kind, says, lambda: hub.plan(BASE))
    assert sum(naps) <= hub.client.PATIENCE_SECONDS
    assert not blobs(BASE)


def test_a_small_question_waits_four_seconds_or_what_the_user_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for chosen, seconds in (("", 4.0), ("30", 30.0), ("0", 4.0), ("soon", 4.0)):
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", chosen)
        assert hub.environment.answer_seconds() == seconds


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_stumbles_once_is_asked_again(
    server: Hub, naps: list[float], status: int
) -> None:
    server.faults = [Fault("/api/", "status", 1, status=status, headers={"Retry-After": "1"})]
    assert hub.plan(BASE).total
    assert len(naps) == 1 and naps[0] >= (1 if status == 429 else 0.5)


def test_nobody_listens(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refusal("network", "cannot be reached.*--offline", lambda: hub.plan(BASE))


def big(server: Hub, size: int = 3 * MB) -> tuple[str, hub.DownloadPlan]:
    """A plan whose first shard is large; its name."""
    name = shard(server)
    server.repos[BASE].files[name] = weights(size, 9)
    return name, hub.plan(BASE)


def test_a_dropped_connection_goes_on_where_it_was(server: Hub) -> None:
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "cut", 3, after=MB)]
    before = server.sent
    events = fetch(plan)
    assert events[-1].done == events[-1].total == plan.left
    assert server.sent - before < plan.left + 3 * MB // 10, "bytes were fetched twice"
    assert any("again in" in event.note for event in events)
    ranges = [asked for _, path, asked in server.requests if "/cdn/" in path and name in path]
    assert ranges[0] == "" and all(asked.startswith("bytes=") for asked in ranges[1:])


def test_a_connection_that_always_drops_ends_in_one_line_and_keeps_what_came(server: Hub) -> None:
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "cut")]
    refusal("network", "what has arrived is kept", lambda: fetch(plan))
    assert hub.find(BASE) is None
    server.faults = []
    assert fetch(hub.plan(BASE))[-1].phase == "done"


def test_a_server_without_ranges_is_read_from_the_start(server: Hub) -> None:
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "cut", 1, after=MB), Fault("/cdn/", "whole")]
    events = fetch(plan)
    assert events[-1].done == events[-1].total > plan.left
    assert (plan.parts[0].folder / name).read_bytes() == server.repos[BASE].files[name]


def test_a_server_that_hangs_in_the_middle_is_left_and_asked_again(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 3)
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "stall", 1, after=MB)]
    events = fetch(plan)
    assert events[-1].phase == "done"
    assert any(event.phase == "wait" and "does not answer" in event.note for event in events)


def test_a_busy_hub_is_waited_for_in_the_middle(server: Hub) -> None:
    name, plan = big(server)
    server.faults = [
        Fault(f"resolve.*{name}", "status", 1, status=429, headers={"Retry-After": "1"})
    ]
    events = fetch(plan)
    assert events[-1].phase == "done"
    assert any(event.phase == "wait" and "wait 1 s" in event.note for event in events)
    server.repos["x/other"] = HubRepo(whole_files())
    server.faults = [Fault("resolve.*bin", "status", status=429, headers={"Retry-After": "900"})]
    refusal("busy", "wait 900 s", lambda: fetch(hub.plan("x/other")))


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (Fault("/cdn/", "wrong"), "damaged", "arrives damaged"),
        (Fault("/cdn/", "longer"), "damaged", "sends more"),
        (Fault("resolve.*-of-", "status", status=401, headers=GATED), "gated", "licence"),
        (Fault("resolve.*-of-", "status", status=403), "refused", "403"),
        (Fault("resolve.*-of-", "status", status=404), "missing", "no someone/base"),
        (Fault("resolve.*-of-", "status", status=500), "broken", "trouble"),
        (Fault("/cdn/", "status", status=403), "refused", "403"),
    ],
)  # fmt: skip
def test_a_download_that_fails_leaves_nothing_that_looks_whole(
    server: Hub, fault: Fault, kind: str, says: str
) -> None:
    server.faults = [fault]
    refusal(kind, says, lambda: fetch(hub.plan(BASE)))
    assert hub.find(BASE) is None
    refusal("offline", "not in the cache as a whole", lambda: hub.resolve(BASE, offline=True))
    found = [model for model in hub.cached() if model.id == BASE]
    assert not any(model.whole for model in found)
    server.faults = []
    fetch(hub.plan(BASE))
    assert hub.find(BASE) is not None


def test_content_that_arrives_wrong_once_is_fetched_once_more(server: Hub) -> None:
    server.faults = [Fault("/cdn/", "wrong", 1)]
    plan = hub.plan(BASE)
    fetch(plan)
    for item in plan.parts[0].files:
        content = (plan.parts[0].folder / item.file.name).read_bytes()
        assert content == server.repos[BASE].files[item.file.name]


@pytest.mark.parametrize("damage", ["flip", "empty", "short"])
@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json"])
def test_a_damaged_file_in_the_cache_is_found_and_fetched_again(
    server: Hub, damage: str, name: str
) -> None:
    plan = hub.plan(BASE)
    fetch(plan)
    place = plan.parts[0].folder / name
    good = place.read_bytes()
    bad = {"flip": bytes([good[0] ^ 1]) + good[1:], "empty": b"", "short": good[:-1]}[damage]
    place.resolve().write_bytes(bad)
    before = server.sent
    events = fetch(hub.plan(BASE))
    assert place.read_bytes() == good
    assert (
        server.sent - before
        <= len(good) + 2 * len(base_files()["model.safetensors.index.json"]) + 100
    )
    assert any("was damaged" in event.note for event in events) or events[-1].done == len(good)
    assert events[-1].done == events[-1].total


def test_a_begun_file_that_is_wrong_is_noticed(server: Hub) -> None:
    name, plan = big(server)
    (file,) = [f.file for f in plan.parts[0].files if f.file.name == name]
    begun = hub.cache.storage(BASE) / "blobs" / f"{file.blob}.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"x" * MB)
    plan = hub.plan(BASE)
    assert plan.left == plan.total - MB
    fetch(plan)
    assert (plan.parts[0].folder / name).read_bytes() == server.repos[BASE].files[name]


# The disk.


def test_a_disk_without_room_is_said_before(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.download_plan, "free_bytes", lambda: 1000)
    plan = hub.plan(BASE)
    assert not plan.fits
    before = server.sent
    refusal("disk", r"needs 3\d\d kB more.*has 1 kB.*models rm", lambda: fetch(plan))
    assert server.sent == before


def test_a_folder_that_cannot_be_made_is_said(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    refusal("disk", "cannot be written.*HF_HOME", lambda: fetch(hub.plan(BASE)))


# Cancelling and resuming.


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
    file = plan.parts[0].files[-1].file
    folder = hub.cache.cache_folder() / ".locks" / hub.cache.storage(WHOLE).name
    folder.mkdir(parents=True)
    with FileLock(folder / f"{file.blob}.lock"):
        refusal("busy", "already", lambda: fetch(plan))
    assert fetch(hub.plan(WHOLE))[-1].phase == "done"


def test_events_add_up_and_tell_a_speed(server: Hub) -> None:
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "slow", rate=2 * MB)]
    events = fetch(plan)
    assert all(a.done <= b.done for a, b in zip(events, events[1:], strict=False))
    timed = [event for event in events if event.speed]
    assert timed and all(event.left_seconds >= 0 for event in timed)
    assert all(0 < event.speed < 8 * MB for event in timed)


def test_speed_is_of_the_last_seconds() -> None:
    speed = hub.download.Speed()
    assert speed.at(0) is None


# What lies in the cache.


def test_cached_tells_sizes_and_rm_frees_them(server: Hub) -> None:
    fetch(hub.plan(HEADS))
    fetch(hub.plan(WHOLE))
    models = {model.id: model for model in hub.cached()}
    assert set(models) == {BASE, HEADS, WHOLE}
    assert all(model.whole for model in models.values())
    assert [models[name].has_heads for name in (BASE, HEADS, WHOLE)] == [False, True, True]
    plan = hub.plan(WHOLE)
    assert plan.total <= models[WHOLE].bytes < plan.total + 500
    disk = hub.cache._bytes(hub.cache.cache_folder())
    freed = hub.remove(WHOLE)
    assert freed == disk - hub.cache._bytes(hub.cache.cache_folder()) >= plan.total
    assert WHOLE not in hub.cache.cached_ids()
    assert hub.plan(WHOLE).left == plan.total
    refusal("missing", "not in the cache", lambda: hub.remove(WHOLE))
    refusal("missing", f"did you mean {BASE}", lambda: hub.remove("Someone/Base"))


def test_rm_frees_the_leftovers_of_a_broken_download(server: Hub) -> None:
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "cut", after=MB)]
    events = hub.pull(plan)
    with pytest.raises(hub.HubError):
        server.faults = [
            Fault(f"/cdn/.*{name}", "cut", 1, after=MB),
            Fault(f"/cdn/.*{name}", "cut"),
        ]
        list(events)
    (model,) = hub.cached()
    assert not model.whole and model.leftover_bytes >= MB // 2
    assert hub.remove(BASE) >= model.leftover_bytes
    assert not hub.cached()


@pytest.mark.parametrize("name", ["", "..", "../../etc", "a/../b", "/", "models"])
def test_rm_of_what_is_no_repo_touches_nothing(server: Hub, name: str) -> None:
    fetch(hub.plan(WHOLE))
    refusal("missing", "not in the cache", lambda: hub.remove(name))
    assert hub.find(WHOLE) is not None


def test_what_huggingface_hub_cached_is_found_and_the_other_way_round(server: Hub) -> None:
    from huggingface_hub import snapshot_download

    place = Path(snapshot_download(WHOLE, endpoint=server.url, cache_dir=hub.cache.cache_folder()))
    assert hub.resolve(WHOLE, offline=True) == place
    assert hub.plan(WHOLE).left == 0
    plan = hub.plan(BASE)
    fetch(plan)
    before = server.sent
    names = [item.file.name for item in plan.parts[0].files]
    theirs = snapshot_download(
        BASE, endpoint=server.url, cache_dir=hub.cache.cache_folder(), allow_patterns=names
    )
    assert Path(theirs) == plan.parts[0].folder and server.sent == before
    from huggingface_hub import scan_cache_dir

    report = scan_cache_dir(hub.cache.cache_folder())
    assert not report.warnings
    assert {repo.repo_id for repo in report.repos} == {BASE, WHOLE}


def test_files_of_one_content_are_all_there_on_a_system_without_links(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(hub.download.os, "symlink", refuse)
    server.repos[BASE].files["special_tokens_map.json"] = b"{}"  # as the generation config
    plan = hub.plan(BASE)
    fetch(plan)
    names = {item.file.name for item in plan.parts[0].files}
    assert names == {file.name for file in plan.parts[0].folder.iterdir()}
    assert not blobs(BASE) and hub.plan(BASE).left == 0


def test_resolve_downloads_once_and_then_asks_nobody(server: Hub) -> None:
    events: list[hub.DownloadEvent] = []
    place = hub.resolve(HEADS, progress=events.append)
    assert (place / "medusa_lm_head.safetensors").is_file() and events[-1].phase == "done"
    before = len(server.requests)
    assert hub.resolve(HEADS) == hub.resolve(HEADS, offline=True) == place
    assert len(server.requests) == before
    assert hub.find(BASE) is None  # only what was asked for


def test_a_stopped_resolve_gives_no_half_folder(server: Hub) -> None:
    name, _ = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "slow", after=MB, rate=50_000)]
    stop = threading.Event()

    def watch(event: hub.DownloadEvent) -> None:
        if event.done > MB:
            stop.set()

    refusal("cancelled", "stopped", lambda: hub.resolve(BASE, progress=watch, stop=stop))
    assert hub.find(BASE) is None


def test_a_cached_main_serves_a_preset_that_pins_another(server: Hub) -> None:
    preset = "FasterDecoding/medusa-vicuna-7b-v1.3"
    server.repos[preset] = HubRepo(heads_files())
    server.repos["lmsys/vicuna-7b-v1.3"] = HubRepo(base_files())
    plan = hub.plan(preset, "main")
    fetch(plan)
    assert hub.resolve(preset, offline=True) == plan.parts[0].folder
    refusal("offline", "as a whole", lambda: hub.resolve(preset, True, "refs/pr/1"))


def test_a_lora_adapter_belongs_to_the_heads_and_names_their_base(server: Hub) -> None:
    files = {
        "adapter_config.json": text(base_model_name_or_path=BASE, r=8),
        "adapter_model.safetensors": weights(5000),
        "adapter_model.bin": weights(5000),
        "medusa_lm_head.safetensors": weights(5000),
    }
    server.repos["x/medusa-lora"] = HubRepo(files)
    plan = hub.plan("x/medusa-lora")
    assert plan.base == BASE
    assert {f.file.name for f in plan.parts[0].files} == set(files) - {"adapter_model.bin"}


def test_a_model_in_a_folder_below_is_found(server: Hub) -> None:
    files = {
        "base/config.json": text(model_type="llama"),
        "base/model.safetensors": weights(5000),
        "base/tokenizer.json": b"{}",
        "head/medusa_lm_head.pt": weights(500),
        "head/config.json": b"{ }",
        "head/training_args.bin": weights(500),
    }
    server.repos["x/medusa-folders"] = HubRepo(files)
    plan = hub.plan("x/medusa-folders")
    names = {f.file.name for part in plan.parts for f in part.files}
    assert names >= set(files) - {"head/training_args.bin"} - {"base/config.json"}
    assert "head/training_args.bin" not in names


def test_half_a_snapshot_is_not_whole(server: Hub) -> None:
    plan = hub.plan(BASE)
    fetch(plan)
    (plan.parts[0].folder / "model-00002-of-00002.safetensors").unlink()
    refusal("offline", "as a whole", lambda: hub.resolve(BASE, offline=True))
    assert hub.resolve(BASE) == plan.parts[0].folder
    refusal("offline", "not in the cache", lambda: hub.resolve("a/b", offline=True))


# Searching.


def repos_named_medusa() -> dict[str, HubRepo]:
    merge = {"config.json": text(model_type="llama"), "model.safetensors": weights(500)}
    gguf = {"Medusa-1.1-L2-7B.Q4_K_M.gguf": weights(500)}
    return {
        "a/medusa-heads": HubRepo(heads_files(), downloads=5),
        "b/Medusa-1.1-L2-7B": HubRepo(merge, downloads=900),
        "c/Medusa-1.1-L2-7B-GGUF": HubRepo(gguf, downloads=800),
        "d/medusa-1.0-whole": HubRepo(whole_files(), downloads=70),
        "e/medusa-told": HubRepo(merge, downloads=60, config={"medusa_num_heads": 3}),
        "f/Tiny-4heads": HubRepo(
            {"config.json": text(medusa_num_heads=4), "model.safetensors": weights(500)}
        ),
        "g/unrelated": HubRepo(merge, downloads=10_000),
        "h/medusa-vllm": HubRepo(
            {"config.json": text(model_type="medusa"), "model.safetensors": weights(500)}
        ),
    }


def test_search_shows_heads_and_no_merges_of_that_name(server: Hub) -> None:
    server.repos = repos_named_medusa()
    found = hub.search()
    assert [repo.id for repo in found] == [
        *("d/medusa-1.0-whole", "e/medusa-told", "a/medusa-heads", "h/medusa-vllm")
    ]
    assert found[0].evidence == "pytorch_model.bin.index.json"
    assert found[2].evidence == "medusa_lm_head.safetensors" and found[2].downloads == 5
    assert [repo.id for repo in hub.search("4HEADS")] == ["f/Tiny-4heads"]
    assert [repo.id for repo in hub.search("medusa 1.0")] == ["d/medusa-1.0-whole"]
    assert hub.search("unrelated") == []


def test_the_last_search_is_kept_for_offline(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    server.repos = repos_named_medusa()
    found = hub.search("heads")
    assert hub.last_search("Heads ") == found and hub.last_search("other") == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(server.requests)
    refusal("offline", "network is off", lambda: hub.search("heads"))
    assert len(server.requests) == asked
    (hub.discovery.paths.cache_dir() / "hub_searches.json").write_text("[")
    assert hub.last_search("heads") == []


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("/api/models", "html"), "broken"),
        (Fault("/api/models", "status", status=500), "broken"),
        (Fault("/api/models", "status", status=429), "busy"),
    ],
)
def test_a_search_that_fails_says_so(server: Hub, fault: Fault, kind: str) -> None:
    server.faults = [fault]
    refusal(kind, "Hub", lambda: hub.search("x"))


def test_repos_that_hang_when_looked_into_do_not_hold_up_a_search(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub.discovery, "DEADLINE_SECONDS", 1.0)
    server.repos = repos_named_medusa()
    server.faults = [Fault("resolve", "hang")]
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "3600")  # until the server ends
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(hub.search).result(60)
    assert [repo.id for repo in found] == ["e/medusa-told", "a/medusa-heads"]


# Headers from afar.


def test_source_reads_headers_and_no_weights(server: Hub) -> None:
    server.repos[BASE].files[shard(server)] = weights(3 * MB, 9)
    before = server.sent
    source = hub.HubSource(BASE)
    assert source.files()[shard(server)] == len(server.repos[BASE].files[shard(server)])
    content = server.repos[BASE].files[shard(server)]
    assert source.read(shard(server), 0, 8) == content[:8]
    assert source.read(shard(server), 8, 5000) == content[8:5008]
    assert source.read(shard(server), len(content) - 10, 50) == content[-10:]
    assert source.read(shard(server), len(content) + 10, 50) == b""
    assert source.read("config.json", 0, 10**9) == server.repos[BASE].files["config.json"]
    assert server.sent - before < 500_000
    refusal("missing", "no file", lambda: source.read("nope", 0, 1))
    refusal("refused", "only headers", lambda: _huge(source))


def _huge(source: hub.HubSource) -> bytes:
    name = next(iter(source.files()))
    source._files[name] = hub.repo.RepoFile(name, 10**10, "0" * 40)
    return source.read(name, 0, 10**9)


def test_source_reads_a_server_without_ranges_and_the_cache(server: Hub) -> None:
    server.faults = [Fault("/cdn/", "whole")]
    content = server.repos[BASE].files[shard(server)]
    assert hub.HubSource(BASE).read(shard(server), 100, 50) == content[100:150]
    server.faults = []
    fetch(hub.plan(BASE))
    before = server.sent
    assert hub.HubSource(BASE).read(shard(server), 100, 50) == content[100:150]
    assert server.sent == before


def test_a_lock_is_let_go_of(server: Hub) -> None:
    plan = hub.plan(BASE)
    fetch(plan)
    with cached_file.locked(plan.parts[0], plan.parts[0].files[0].file):
        pass


def test_inspect_of_an_id_reads_headers_and_configs_only(server: Hub, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", heads=0)
    layout_a_safetensors(tmp_path / "heads", tmp_path / "base")
    for repo, folder in ((BASE, "base"), (HEADS, "heads")):
        files = {file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()}
        if repo == HEADS:
            files["config.json"] = text(base_model_name_or_path=BASE, medusa_num_heads=9)
        server.repos[repo] = HubRepo(files)
    before = server.sent
    report = inspect(HEADS, open_source=open_anywhere)
    assert report.heads is not None and report.heads.layout == "A" and report.backbone == BASE
    assert set(report.memory) == {"fp32", "fp16", "int8", "nf4"} and not report.is_here
    assert any("9" in note for note in report.notes), "the config's lie is not shown"
    assert not server.asked("tokenizer.json") and server.sent > before
