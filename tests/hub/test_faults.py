"""Names, gates, networks and servers that fail: what is said, tried again, and kept."""

from types import SimpleNamespace

import pytest
from support.downloads import big, blobs, fetch, refusal
from support.hub_files import (
    BASE,
    HEADS,
    MB,
    base_files,
    whole_files,
)
from support.hub_server import Fault, Hub, HubRepo

from medusa_chat import hub

GATED = {"X-Error-Code": "GatedRepo"}


def log_in(server: Hub, *repos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server.tokens["hf_secret"] = set(repos)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client slept between two tries, on a clock that stands but for them."""
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(hub.client, "time", clock)
    return slept


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
    refusal("missing", "not a valid Hub id", lambda: hub.plan(name))
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
        (Fault("/api/", "status", status=404), "missing", "someone/base is not on the Hub"),
        (Fault("/api/", "status", status=429), "busy", r"\(429\): wait 60 s"),
        (
            Fault("/api/", "status", status=429, headers={"Retry-After": "300"}),
            *("busy", "wait 300 s"),
        ),
        (Fault("/api/", "status", status=500), "broken", r"server error \(500\)"),
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
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    server.faults = [fault]
    refusal(kind, says, lambda: hub.plan(BASE))
    assert sum(naps) <= hub.client.RETRY_SECONDS
    assert not blobs(BASE)


def test_a_small_question_waits_four_seconds_or_what_the_user_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    for chosen, seconds in ((constants.DEFAULT_ETAG_TIMEOUT, 4.0), (30, 30.0)):
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", chosen)
        assert hub.client.answer_seconds() == seconds


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


def test_a_dropped_connection_goes_on_where_it_was(server: Hub) -> None:
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "cut", 3, after=MB)]
    before = server.sent
    events = fetch(plan)
    assert events[-1].done == events[-1].total == plan.left
    assert server.sent - before < plan.left + 3 * MB // 10, "bytes were fetched twice"
    assert any("retrying in" in event.note for event in events)
    ranges = [asked for _, path, asked in server.requests if "/cdn/" in path and name in path]
    assert ranges[0] == "" and all(asked.startswith("bytes=") for asked in ranges[1:])


def test_a_connection_that_always_drops_ends_in_one_line_and_keeps_what_came(server: Hub) -> None:
    name, plan = big(server)
    server.faults = [Fault(f"/cdn/.*{name}", "cut")]
    refusal("network", "the partial file is kept", lambda: fetch(plan))
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
    assert any(event.phase == "wait" and "rate limit" in event.note for event in events)
    server.repos["x/other"] = HubRepo(whole_files())
    server.faults = [Fault("resolve.*bin", "status", status=429, headers={"Retry-After": "900"})]
    refusal("busy", "wait 900 s", lambda: fetch(hub.plan("x/other")))


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (Fault("/cdn/", "wrong"), "damaged", "arrived damaged"),
        (Fault("/cdn/", "longer"), "damaged", "arrived damaged"),
        (Fault("resolve.*-of-", "status", status=401, headers=GATED), "gated", "licence"),
        (Fault("resolve.*-of-", "status", status=403), "refused", "403"),
        (Fault("resolve.*-of-", "status", status=404), "missing", "someone/base is not on the Hub"),
        (Fault("resolve.*-of-", "status", status=500), "broken", "server error"),
        (Fault("/cdn/", "status", status=403), "refused", "403"),
    ],
)  # fmt: skip
def test_a_download_that_fails_leaves_nothing_that_looks_whole(
    server: Hub, fault: Fault, kind: str, says: str
) -> None:
    server.faults = [fault]
    refusal(kind, says, lambda: fetch(hub.plan(BASE)))
    assert hub.find(BASE) is None
    refusal("offline", "is incomplete", lambda: hub.resolve(BASE))
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
        content = (plan.parts[0].folder / item.name).read_bytes()
        assert content == server.repos[BASE].files[item.name]


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
    (file,) = [f for f in plan.parts[0].files if f.name == name]
    begun = hub.cache.storage(BASE) / "blobs" / f"{file.blob}.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"x" * MB)
    plan = hub.plan(BASE)
    assert plan.left == plan.total - MB
    fetch(plan)
    assert (plan.parts[0].folder / name).read_bytes() == server.repos[BASE].files[name]
