"""What lies in the cache: sizes, removal, half a snapshot, huggingface_hub's own files."""

import errno
from pathlib import Path
from typing import Any

import pytest
from support.downloads import big, blobs, fetch, refusal
from support.hub_files import (
    BASE,
    HEADS,
    MB,
    WHOLE,
    base_files,
    heads_files,
    text,
    weights,
    whole_files,
)
from support.hub_server import Fault, Hub, HubRepo, commit

from medusa_chat import hub
from medusa_chat.checkpoints.places import place_of


def test_cached_tells_sizes_and_rm_frees_them(server: Hub) -> None:
    fetch(hub.plan(HEADS))
    fetch(hub.plan(WHOLE))
    models = {model.id: model for model in hub.cached()}
    assert set(models) == {BASE, HEADS, WHOLE}
    assert all(model.whole for model in models.values())
    assert [models[name].has_heads for name in (BASE, HEADS, WHOLE)] == [False, True, True]
    plan = hub.plan(WHOLE)
    assert plan.total <= models[WHOLE].bytes < plan.total + 500
    disk = hub.cache.bytes_in(hub.cache.cache_folder())
    freed = hub.remove(WHOLE)
    assert freed == disk - hub.cache.bytes_in(hub.cache.cache_folder()) >= plan.total
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
    assert hub.resolve(WHOLE) == place
    assert hub.plan(WHOLE).left == 0
    plan = hub.plan(BASE)
    fetch(plan)
    before = server.sent
    names = [item.name for item in plan.parts[0].files]
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
    names = {item.name for item in plan.parts[0].files}
    assert names == {file.name for file in plan.parts[0].folder.iterdir()}
    assert not blobs(BASE) and hub.plan(BASE).left == 0


def test_a_disk_that_is_full_while_a_file_is_copied_leaves_no_half_file(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    def cut(source: Path, place: Path) -> None:
        place.write_bytes(source.read_bytes()[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub.download.os, "symlink", refuse)
    server.repos[BASE].files["special_tokens_map.json"] = b"{}"  # as the generation config
    with monkeypatch.context() as patch, pytest.raises(hub.HubError, match="No space left"):
        patch.setattr(hub.download.shutil, "copyfile", cut)
        fetch(hub.plan(BASE))
    plan = hub.plan(BASE)
    fetch(plan)
    for item in plan.parts[0].files:
        assert (plan.parts[0].folder / item.name).stat().st_size == item.size


def test_what_is_cached_is_found_and_nobody_is_asked(server: Hub) -> None:
    events = fetch(hub.DownloadPlan(HEADS, (hub.plan_repo(HEADS),)))
    before = len(server.requests)
    place = hub.resolve(HEADS)
    assert (place / "medusa_lm_head.safetensors").is_file() and events[-1].phase == "done"
    assert len(server.requests) == before
    assert hub.find(BASE) is None  # only what was asked for


def test_a_cached_main_serves_a_preset_that_pins_another(server: Hub) -> None:
    preset = "FasterDecoding/medusa-vicuna-7b-v1.3"
    server.repos[preset] = HubRepo(heads_files())
    server.repos["lmsys/vicuna-7b-v1.3"] = HubRepo(base_files())
    plan = hub.plan(preset, "main")
    fetch(plan)
    assert hub.resolve(preset) == plan.parts[0].folder


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
    assert {f.name for f in plan.parts[0].files} == set(files) - {"adapter_model.bin"}


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
    names = {f.name for part in plan.parts for f in part.files}
    assert names >= set(files) - {"head/training_args.bin"} - {"base/config.json"}
    assert "head/training_args.bin" not in names


def test_shards_in_a_folder_below_are_whole_when_all_are_there(server: Hub) -> None:
    files = {f"base/{name}": content for name, content in base_files().items()}
    server.repos["x/below"] = HubRepo(files)
    fetch(plan := hub.plan("x/below"))
    assert hub.find("x/below") == plan.parts[0].folder
    (plan.parts[0].folder / "base" / "model-00002-of-00002.safetensors").unlink()
    assert hub.find("x/below") is None


def test_half_a_snapshot_is_not_whole(server: Hub) -> None:
    plan = hub.plan(BASE)
    fetch(plan)
    (plan.parts[0].folder / "model-00002-of-00002.safetensors").unlink()
    refusal("offline", "is incomplete", lambda: hub.resolve(BASE))
    fetch(hub.plan(BASE))
    assert hub.resolve(BASE) == plan.parts[0].folder
    refusal("offline", "not in the cache", lambda: hub.resolve("a/b"))


def test_a_snapshot_that_no_branch_names_is_whole_when_its_files_are(server: Hub) -> None:
    sha = commit(server.repos[BASE].files)
    fetch(hub.plan(BASE, sha))
    assert not (hub.cache.storage(BASE) / "refs").exists()
    folder = hub.cache.storage(BASE) / "snapshots" / sha
    assert hub.find(BASE) == hub.resolve(BASE) == folder
    assert [(model.id, model.whole) for model in hub.cached()] == [(BASE, True)]
    assert place_of(str(hub.cache.storage(BASE))) == place_of(BASE) == folder
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert hub.find(BASE) is None and not hub.cached()[0].whole


def test_rm_leaves_another_repo_of_the_same_commit(server: Hub) -> None:
    old, new = "someone/old-name", "someone/new-name"  # a renamed repo, cached by both names
    server.repos |= {old: HubRepo(whole_files()), new: HubRepo(whole_files())}
    for removed, kept in ((old, new), (new, old)):
        fetch(hub.plan(old))
        fetch(hub.plan(new))
        hub.remove(removed)
        assert hub.find(kept) and not hub.find(removed)


def test_rm_of_a_file_leaves_what_another_commit_needs(server: Hub) -> None:
    """Of a repo whose commits share the content of a GGUF file."""
    files = {name: weights(size) for name, size in (("a.gguf", 9000), ("b.gguf", 5000))}
    server.repos["x/files"] = HubRepo(files, revisions={"old": {"c.gguf": files["a.gguf"]}})
    fetch(hub.plan("x/files/c.gguf", "old"))
    for name in files:
        fetch(hub.plan(f"x/files/{name}"))
    hub.remove("x/files/a.gguf")
    assert hub.cached_folder("x/files/b.gguf") and not hub.cached_folder("x/files/a.gguf")
    old = hub.find("x/files", "old")
    assert old and (old / "c.gguf").read_bytes() == files["a.gguf"]


def test_a_kill_while_files_are_linked_leaves_nothing_that_looks_whole(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = hub.plan(WHOLE)
    count = len(plan.parts[0].files)
    link = hub.download.os.symlink
    for allowed in range(count):
        links: list[Any] = []

        def some(*names: Any, links: list[Any] = links, allowed: int = allowed) -> None:
            if len(links) == allowed:
                raise KeyboardInterrupt
            links.append(link(*names))

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(hub.download.os, "symlink", some)
            hub.download.link_snapshot(plan.parts[0])
        assert hub.find(WHOLE) is None
        for file in plan.parts[0].folder.iterdir():
            file.unlink()
