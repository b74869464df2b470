"""Searching the Hub, and reading headers from afar."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.checkpoints import layout_a_safetensors, write_checkpoint
from support.downloads import refusal
from support.hub_files import (
    BASE,
    HEADS,
    MB,
    SHARD,
    heads_files,
    text,
    weights,
    whole_files,
)
from support.hub_server import Fault, Hub, HubRepo

from medusa_chat import hub
from medusa_chat.checkpoints.inspection import inspect, open_anywhere


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
    refusal("offline", "network is disabled", lambda: hub.search("heads"))
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
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(hub.search).result(60)
    assert [repo.id for repo in found] == ["e/medusa-told", "a/medusa-heads"]


# Headers from afar.


def test_source_reads_headers_and_no_weights(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos[BASE].files[SHARD] = weights(3 * MB, 9)
    before = server.sent
    source = hub.HubSource(BASE)
    assert source.files()[SHARD] == len(server.repos[BASE].files[SHARD])
    content = server.repos[BASE].files[SHARD]
    assert source.read(SHARD, 0, 8) == content[:8]
    assert source.read(SHARD, 8, 5000) == content[8:5008]
    assert source.read(SHARD, len(content) - 10, 50) == content[-10:]
    assert source.read(SHARD, len(content) + 10, 50) == b""
    assert source.read("config.json", 0, 10**9) == server.repos[BASE].files["config.json"]
    assert server.sent - before < 500_000
    refusal("missing", "no file", lambda: source.read("nope", 0, 1))
    monkeypatch.setattr(hub.repo, "MAX_READ", 6000)
    refusal("refused", "only headers", lambda: source.read(SHARD, 0, 7000))


def test_source_reads_a_server_without_ranges(server: Hub) -> None:
    server.faults = [Fault("/cdn/", "whole")]
    content = server.repos[BASE].files[SHARD]
    assert hub.HubSource(BASE).read(SHARD, 100, 50) == content[100:150]


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
    assert set(report.memory) == {"fp32", "bf16", "fp16", "int8", "nf4"} and not report.is_here
    assert any("9" in note for note in report.notes), "the config's lie is not shown"
    assert not server.asked("tokenizer.json") and server.sent > before
