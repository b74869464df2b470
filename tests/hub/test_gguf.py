"""Repos of GGUF files: one file is planned, fetched, read by ranges, loaded and removed."""

import json
from pathlib import Path
from shutil import rmtree

import pytest
from support.downloads import fetch, refusal
from support.gguf_models import tiny_model, write_gguf
from support.hub_files import BASE, BASE_FILE, text
from support.hub_server import Hub, HubRepo

from medusa_chat import hub
from medusa_chat.checkpoints import fetch as fetching
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.inspection import inspect, open_anywhere
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.cli.main import main
from medusa_chat.messages import LoadRequest

REPO = "someone/tiny-GGUF"
KINDS = {"tiny-Q4_0.gguf": "Q4_0", "tiny-Q8_0.gguf": "Q8_0", "tiny-F32.gguf": "F32"}


@pytest.fixture
def repo(server: Hub, tmp_path: Path) -> Hub:
    """The Hub with a repo of three GGUF files of one model, a config and no other weights."""
    model = tiny_model()
    files = {name: write_gguf(tmp_path / name, model, kind) for name, kind in KINDS.items()}
    contents = {name: file.read_bytes() for name, file in files.items()}
    for file in files.values():
        file.unlink()
    about = {"README.md": b"---\nlicense: mit\n---", "config.json": text(model_type="llama")}
    server.repos[REPO] = HubRepo(contents | about | {"mmproj-tiny-F16.gguf": b"x" * 900_000})
    return server


def test_the_largest_quantised_file_is_planned_and_nothing_else(repo: Hub) -> None:
    plan = hub.plan(REPO)
    (part,) = plan.parts
    assert [item.name for item in part.files] == ["tiny-Q8_0.gguf"] and part.role == "model"
    assert plan.total == plan.left == len(repo.repos[REPO].files["tiny-Q8_0.gguf"])
    assert "reading tiny-Q8_0.gguf, the largest quantised of 3 GGUF files" in plan.notes[0]
    named = hub.plan(f"{REPO}/tiny-Q4_0.gguf")
    assert [item.name for item in named.parts[0].files] == ["tiny-Q4_0.gguf"]
    assert not named.notes
    refusal("missing", "it has tiny-Q4_0.gguf", lambda: hub.plan(f"{REPO}/no.gguf"))


def test_safetensors_come_before_gguf_unless_the_file_is_named(repo: Hub) -> None:
    assert not any(item.name.endswith("gguf") for item in hub.plan(BASE).parts[0].files)
    (part,) = hub.plan(f"{BASE}/{BASE_FILE}").parts
    assert [item.name for item in part.files] == [BASE_FILE]


def test_a_file_that_is_named_is_fetched_beside_another(repo: Hub) -> None:
    fetch(hub.plan(REPO))
    assert hub.cached_folder(REPO) and hub.cached_folder(f"{REPO}/tiny-Q8_0.gguf")
    assert hub.cached_folder(f"{REPO}/tiny-Q4_0.gguf") is None
    request = LoadRequest(f"{REPO}/tiny-Q4_0.gguf")
    list(fetching.fetch(request))
    found = Checkpoint.find(request)
    assert found.source.name == "tiny-Q4_0.gguf" and found.repo == f"{REPO}/tiny-Q4_0.gguf"
    assert hub.cached_folder(f"{REPO}/tiny-Q4_0.gguf")


def test_its_header_is_inspected_by_ranges(repo: Hub) -> None:
    before = repo.sent
    report = inspect(f"{REPO}/tiny-F32.gguf", open_source=open_anywhere)
    assert (report.family, report.stored, report.is_here) == ("llama", "F32", False)
    assert report.memory and not report.problems
    assert inspect(REPO, open_source=open_anywhere).stored == "Q8_0"
    assert repo.sent - before < 500_000  # the headers, and not the 900 kB beside them
    refusal("missing", "no file no.gguf", lambda: open_anywhere(f"{REPO}/no.gguf"))


def test_it_is_downloaded_used_as_it_is_listed_and_removed(
    repo: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--prompt", "a", "--max-new-tokens", "3", "--json", "--device", "cpu"]
    assert main(["generate", "--backbone", REPO, *asked]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[0])["model"] == REPO
    assert "reading tiny-Q8_0.gguf, the largest quantised of 3 GGUF files" in said.err
    assert json.loads(said.out.splitlines()[0])["precision"] == "Q8_0"
    assert main(["generate", "--checkpoint", f"{REPO}/tiny-Q4_0.gguf", *asked]) == 0
    assert not kept_copies.kept()
    capsys.readouterr()
    assert main(["models", "list"]) == 0
    out = capsys.readouterr().out
    assert f"{REPO}  (a backbone)" in out and "converted to" not in out
    assert main(["models", "rm", f"{REPO}/tiny-Q4_0.gguf"]) == 0
    assert hub.cached_folder(REPO) and not hub.cached_folder(f"{REPO}/tiny-Q4_0.gguf")
    assert main(["models", "rm", REPO]) == 0
    assert not hub.cached()
    assert main(["models", "rm", f"{REPO}/tiny-Q4_0.gguf"]) == 4


def test_pull_names_the_file_that_was_chosen(repo: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", REPO]) == 0
    assert "reading tiny-Q8_0.gguf, the largest quantised" in capsys.readouterr().err
    assert main(["models", "pull", f"{REPO}/tiny-F32.gguf"]) == 0
    assert hub.cached_folder(f"{REPO}/tiny-F32.gguf")


def test_a_damaged_file_on_the_hub_is_one_line(
    repo: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.repos[REPO].files["tiny-Q4_0.gguf"] = b"GGUF" + bytes(40)
    assert main(["inspect", f"{REPO}/tiny-Q4_0.gguf"]) == 4
    assert main(["generate", "--backbone", f"{REPO}/tiny-Q4_0.gguf", "--prompt", "a"]) == 4
    assert "is broken" in capsys.readouterr().err


SPLIT = "someone/split-GGUF"
PARTS = tuple(f"Q8_0/tiny-0000{n}-of-00005.gguf" for n in range(1, 6))


@pytest.fixture
def split(server: Hub, tmp_path: Path) -> Hub:
    """The Hub with a repo of a folder for each kind: a split file, and a smaller one."""
    model = tiny_model()
    first = write_gguf(tmp_path / "Q8_0" / "tiny.gguf", model, "Q8_0", split=5)
    files = {part: (tmp_path / part).read_bytes() for part in PARTS}
    whole = write_gguf(tmp_path / "tiny-Q4_0.gguf", model, "Q4_0").read_bytes()
    rmtree(first.parent)
    (tmp_path / "tiny-Q4_0.gguf").unlink()
    server.repos[SPLIT] = HubRepo(files | {"Q4_0/tiny-Q4_0.gguf": whole})
    return server


@pytest.mark.parametrize("name", [SPLIT, f"{SPLIT}/{PARTS[0]}", f"{SPLIT}/{PARTS[3]}"])
def test_all_parts_of_a_split_file_are_planned_and_looked_at(name: str, split: Hub) -> None:
    size = sum(len(split.repos[SPLIT].files[part]) for part in PARTS)
    plan = hub.plan(name)
    assert tuple(item.name for item in plan.parts[0].files) == PARTS
    assert plan.total == plan.left == size
    report = inspect(name, open_source=open_anywhere)
    assert (report.backbone_bytes, report.stored, report.is_here) == (size, "Q8_0", False)
    assert report.memory and not report.problems
    split.repos[SPLIT].files.pop(PARTS[2])
    if name != SPLIT:
        refusal("missing", f"has no {PARTS[2]}: it has {PARTS[0]}, ", lambda: hub.plan(name))
        assert f"{PARTS[2]} is missing" in inspect(name, open_source=open_anywhere).problems[0]
    else:  # the other file is whole
        assert hub.plan(name).parts[0].files[0].name == "Q4_0/tiny-Q4_0.gguf"
        assert inspect(name, open_source=open_anywhere).stored == "Q4_0"


def test_a_split_file_is_downloaded_and_removed_with_all_its_parts(
    split: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--prompt", "a", "--max-new-tokens", "3", "--json", "--device", "cpu"]
    assert main(["generate", "--backbone", f"{SPLIT}/{PARTS[1]}", *asked]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["precision"] == "Q8_0"
    folder = hub.cached_folder(f"{SPLIT}/{PARTS[4]}")
    assert folder and all((folder / part).is_file() for part in PARTS)
    assert main(["models", "pull", f"{SPLIT}/Q4_0/tiny-Q4_0.gguf"]) == 0
    (folder / PARTS[2]).unlink()
    assert not hub.cached_folder(f"{SPLIT}/{PARTS[0]}") and hub.cached_folder(SPLIT)
    assert main(["generate", "--backbone", f"{SPLIT}/{PARTS[0]}", *asked]) == 0  # fetched again
    assert main(["models", "rm", f"{SPLIT}/{PARTS[2]}"]) == 0
    assert not (folder / PARTS[0]).exists()
    assert hub.cached_folder(f"{SPLIT}/Q4_0/tiny-Q4_0.gguf")
    (folder / "Q4_0/tiny-Q4_0.gguf").rename(folder / "a-00001-of-00002.gguf")
    assert not hub.cached_folder(SPLIT)


def test_files_that_are_deep_in_a_repo_are_chosen_as_those_at_its_top(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {}
    for kind in ("Q4_0", "Q8_0"):
        file = write_gguf(tmp_path / f"tiny-{kind}.gguf", tiny_model(), kind)
        files[f"gguf/{kind}/{file.name}"] = file.read_bytes()
        file.unlink()
    server.repos[REPO] = HubRepo(files)
    chosen = "gguf/Q8_0/tiny-Q8_0.gguf"
    assert [item.name for item in hub.plan(REPO).parts[0].files] == [chosen]
    assert inspect(REPO, open_source=open_anywhere).stored == "Q8_0"
    asked = ["--prompt", "a", "--max-new-tokens", "3", "--device", "cpu"]
    assert main(["generate", "--backbone", REPO, *asked]) == 0
    assert f"reading {chosen}, the largest quantised of 2 GGUF files" in capsys.readouterr().err
    assert hub.cached_folder(f"{REPO}/{chosen}")
    server.repos.clear()
    assert main(["generate", "--backbone", REPO, *asked, "--offline"]) == 0
