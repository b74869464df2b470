"""What a download would fetch: the files, their bytes, the base; by the real huggingface_hub."""

from pathlib import Path
from typing import Any

import pytest
from support.downloads import fetch, refusal
from support.hub_files import (
    BASE,
    HEADS,
    WHOLE,
    base_files,
    heads_files,
    text,
    weights,
    whole_files,
)
from support.hub_server import Hub, HubRepo, commit

from medusa_chat import hub

BASE_NEEDS = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    "model.safetensors.index.json",
}


def test_plan_of_heads_counts_the_base_in_one_format_to_the_byte(server: Hub) -> None:
    plan = hub.plan(HEADS)
    heads, base = plan.parts
    assert (heads.role, base.role, plan.base) == ("heads", "backbone", BASE)
    assert {f.name for f in heads.files} == {"config.json", "medusa_lm_head.safetensors"}
    assert {f.name for f in base.files} == BASE_NEEDS
    files = server.repos[BASE].files, server.repos[HEADS].files
    expected = sum(len(files[0][name]) for name in BASE_NEEDS)
    expected += sum(len(files[1][f.name]) for f in heads.files)
    assert plan.total == plan.left == expected
    assert plan.refusal is None and not plan.gated
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
    refusal("missing", "is not on the Hub", lambda: hub.plan(HEADS, backbone=BASE))


def test_a_whole_model_needs_no_base_and_its_pickles_where_nothing_else_is(server: Hub) -> None:
    plan = hub.plan(WHOLE)
    assert [part.role for part in plan.parts] == ["model"]
    assert {f.name for f in plan.parts[0].files} == set(whole_files())


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
    assert {f.name for f in plan.parts[0].files} == {
        "config.json",
        "medusa_lm_head.safetensors",
    }
    fetch(plan)
    assert hub.resolve(preset).name == commit(safe)


@pytest.mark.parametrize(
    "files",
    [
        {"README.md": b"x"},
        {"mmproj.gguf": b"x", "config.json": b"{}"},
        {"original/consolidated.00.pth": b"x", "config.json": text(model_type="llama")},
    ],
)
def test_a_repo_without_usable_weights_is_refused(server: Hub, files: dict[str, bytes]) -> None:
    server.repos["x/nothing"] = HubRepo(files)
    refusal("refused", "neither Medusa heads nor weights", lambda: hub.plan("x/nothing"))


def test_an_index_that_names_a_missing_shard_is_refused(server: Hub) -> None:
    del server.repos[BASE].files["model-00002-of-00002.safetensors"]
    refusal("broken", "is incomplete: model-00002-of-00002", lambda: hub.plan(BASE))


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/evil.json", "a\\..\\b.json", "C:x.json"])
def test_file_names_that_leave_the_folder_are_refused(server: Hub, name: str) -> None:
    server.repos[BASE].files[name] = b"{}"
    refusal("broken", "is invalid", lambda: hub.plan(BASE))
