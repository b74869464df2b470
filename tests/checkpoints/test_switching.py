"""Loading: what a load downloads, how it is stopped, and what is there afterwards."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from support.checkpoints import (
    heads_folder,
    layered,
    lm_head_of,
    with_bias,
    with_own,
    write_checkpoint,
)
from support.hub_files import use
from support.hub_server import Fault, Hub, HubRepo, serving
from support.loading import answer
from support.waiting import ask, wait_for
from support.warm_workers import warm_starts

from medusa_chat import hub
from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import LoadStopped, ModelError
from medusa_chat.hub.catalog import known_template, model_presets
from medusa_chat.messages import LoadPhase, LoadRequest, Request
from medusa_chat.runtime.requests import MeasureMemory, Reply
from medusa_chat.runtime.runner import PATIENCE, InProcess, WorkerProcess
from medusa_chat.runtime.session import Session

BASE = "someone/base"
HEADS = "someone/medusa-heads"
SETTINGS = GenerationSettings(max_new_tokens=6, seed=1)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("loading") / "backbone", heads=0)


@pytest.fixture(scope="module")
def heads(backbone: Path) -> Path:
    folder = heads_folder(backbone.parent / "heads", base_model_name_or_path=BASE)
    save_file(with_bias(layered()), folder / "medusa_lm_head.safetensors")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def server(
    backbone: Path, heads: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Hub]:
    """A Hub with heads and the base that they name; for this process and its children."""
    repos = {BASE: HubRepo(contents(backbone)), HEADS: HubRepo(contents(heads))}
    with serving(repos) as running:
        use(running, monkeypatch, tmp_path)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        yield running


# The download.


def test_a_load_of_a_hub_id_downloads_heads_and_base_and_counts_their_bytes(server: Hub) -> None:
    total = hub.plan(HEADS).total
    phases = list(load(LoadRequest(HEADS)))
    names = list(dict.fromkeys(phase.name for phase, _ in phases))
    assert names == ["resolve", "download", "read", "check", "warm up", "ready"]
    news = [phase for phase, _ in phases if phase.name == "download"]
    assert news[-1].done == news[-1].total == total > 100_000
    assert all(a.done <= b.done <= b.total for a, b in zip(news, news[1:], strict=False))
    model = phases[-1][1]
    assert model is not None and model.info.heads == 3
    assert answer(model)[-1].token_ids
    asked = len(server.requests)
    again = [phase.name for phase, _ in load(LoadRequest(HEADS))]
    assert "download" not in again and len(server.requests) == asked


def test_a_local_folder_of_heads_downloads_only_its_base(server: Hub, heads: Path) -> None:
    news = [p for p, _ in load(LoadRequest(str(heads))) if p.name == "download"]
    assert news[-1].done == hub.plan(BASE).total and not server.asked(HEADS)


def test_heads_that_name_no_base_take_the_presets_base(server: Hub, backbone: Path) -> None:
    """As Lepton's do (layout G)."""
    preset = next(p for p in model_presets() if p.layout == "G" and p.base)
    folder = heads_folder(server_folder(server), base_model_name_or_path="N/A")
    save_file(with_own(layered(), lm_head_of(backbone)), folder / "model.safetensors")
    server.repos[preset.id] = HubRepo(contents(folder))
    server.repos[str(preset.base)] = HubRepo(contents(backbone))
    model = list(load(LoadRequest(preset.id)))[-1][1]
    assert model is not None and model.info.heads == 3
    server.repos["someone/unknown"] = HubRepo(contents(folder))
    with pytest.raises(ModelError, match="does not name their backbone: give --backbone"):
        list(load(LoadRequest("someone/unknown")))


def server_folder(server: Hub) -> Path:
    """A new folder for this test's files."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).parent / "made"


def test_a_known_repo_without_a_chat_template_gets_ours_and_says_so(
    server: Hub, tmp_path: Path
) -> None:
    known = next(p for p in model_presets() if p.chat_template and p.base and not p.revision)
    bare = write_checkpoint(tmp_path / "bare", template=None)
    server.repos[known.id] = HubRepo(contents(bare))
    model = list(load(LoadRequest(known.id)))[-1][1]
    ours = known_template(known.id)
    assert model is not None and ours is not None and model.tokenizer.chat_template == ours.text
    assert any("chat template" in note and known.id in note for note in model.info.notes)
    # heads of one's own on the same base: known by the base's id
    server.repos[str(known.base)] = HubRepo(contents(bare))
    folder = heads_folder(tmp_path / "mine", base_model_name_or_path=known.base)
    save_file(with_bias(layered()), folder / "medusa_lm_head.safetensors")
    model, ours = list(load(LoadRequest(str(folder))))[-1][1], known_template(str(known.base))
    assert model is not None and ours and model.tokenizer.chat_template == ours.text
    model = list(load(LoadRequest(str(bare))))[-1][1]
    assert model is not None and not model.tokenizer.chat_template


# Stopping.


@pytest.mark.parametrize("name", ["resolve", "read", "quantise", "check", "warm up"])
def test_a_load_stops_at_each_phase_and_says_what_is_there(backbone: Path, name: str) -> None:
    runner = InProcess()
    list(runner.run(LoadRequest(str(backbone))))
    seen = []
    with pytest.raises(LoadStopped) as refusal:
        for phase in runner.run(LoadRequest(str(backbone), precision="nf4")):
            seen.append(phase.name)
            if phase.name == name:
                runner.stop()
    assert seen[-1] == name
    if name == "resolve":  # the next model's files were not all here: nothing was freed
        assert f"{backbone} stays loaded" in str(refusal.value)
        assert list(runner.run(Reply("hi", SETTINGS)))
    else:
        assert "no model is loaded" in str(refusal.value)
        with pytest.raises(ModelError, match="load one first"):
            list(runner.run(Reply("hi", SETTINGS)))
    assert [p.name for p in runner.run(LoadRequest(str(backbone)))][-1] == "ready"


@pytest.fixture(scope="module")
def far(
    backbone: Path, heads: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Hub, Session]]:
    """A Hub, and a session whose process knows it; one for all, since it starts slowly."""
    folder = tmp_path_factory.mktemp("far")
    repos = {BASE: HubRepo(contents(backbone)), HEADS: HubRepo(contents(heads))}
    with serving(repos) as running, pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_ENDPOINT", running.url)
        patched.setenv("HF_HUB_OFFLINE", "0")
        patched.setenv("HF_HUB_CACHE", str(folder / "cache"))
        session = Session(WorkerProcess())
        yield running, session
        session.close()


@pytest.fixture
def child(far: tuple[Hub, Session], backbone: Path) -> Session:
    """The session with the backbone loaded."""
    _, session = far
    session.submit(LoadRequest(str(backbone)))
    wait_for(lambda: session.state.status == "ready" and not session.state.message, 240)
    return session


def test_a_download_stops_keeps_the_old_model_and_goes_on_later(
    child: Session, far: tuple[Hub, Session], backbone: Path
) -> None:
    server, _ = far
    size = (backbone / "model.safetensors").stat().st_size
    server.faults.append(Fault(r"/model\.safetensors", "slow", after=size // 2, rate=2000))
    pid = child.runner.pid
    loading = child.submit(LoadRequest(HEADS))
    wait_for(lambda: child.state.phase == "download" and child.state.done > size // 3)
    assert child.state.total > size
    child.cancel(loading)
    wait_for(lambda: child.state.status == "ready")
    assert child.state.model is not None and child.state.model.name == str(backbone)
    assert f"{HEADS} was stopped; what was downloaded is kept" in child.state.message
    job = child.submit(Reply("hi", SETTINGS))
    assert job.done.wait(240) and not job.error and child.runner.pid == pid
    server.faults.clear()
    before = server.sent
    child.submit(LoadRequest(HEADS))
    wait_for(lambda: child.state.model is not None and child.state.model.name == HEADS)
    assert server.sent - before < size - size // 3  # it went on where it had stopped
    assert child.state.message == ""


def test_a_refused_id_leaves_the_old_model_and_says_why(child: Session) -> None:
    child.submit(LoadRequest("nobody/nothing"))
    job = child.submit(Reply("hi", SETTINGS))
    assert job.done.wait(240) and not job.error
    assert child.state.status == "ready" and "nobody/nothing" in child.state.message


def test_a_load_inside_one_long_call_is_ended_with_its_process(
    child: Session, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_chat.runtime.runner.PATIENCE", {"find": 0.2})
    assert isinstance(child.runner, WorkerProcess) and child.runner.pid
    ask(child, MeasureMemory())  # and all that was asked before has ended
    os.kill(child.runner.pid, signal.SIGSTOP)  # it heeds nothing any more
    loading = child.submit(LoadRequest(str(backbone)))
    wait_for(lambda: loading.state == "running" and child.runner._running is not None)
    with warm_starts():  # of the process that takes its place, and reads no Hub
        child.cancel(loading)
        wait_for(lambda: child.state.status == "empty")
    assert "was stopped: no model is loaded" in child.state.message
    child.submit(LoadRequest(str(backbone)))
    wait_for(lambda: child.state.status == "ready", 240)


def test_a_load_that_reads_one_large_file_is_ended_within_a_second(
    child: Session, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = child.runner
    assert isinstance(runner, WorkerProcess) and runner.pid and PATIENCE["read"] <= 1.0
    monkeypatch.setattr("medusa_chat.runtime.runner.PATIENCE", {"find": 240, "read": 0.2})
    ask(child, MeasureMemory())
    os.kill(runner.pid, signal.SIGSTOP)  # it is inside one long call from here on
    exchange = runner._exchange

    def reading(request: Request[Any]) -> Iterator[Any]:
        yield LoadPhase("resolve")
        yield LoadPhase("read")
        yield from exchange(request)

    monkeypatch.setattr(runner, "_exchange", reading)
    loading = child.submit(LoadRequest(str(backbone)))
    wait_for(lambda: child.state.phase == "read")
    with warm_starts():
        child.cancel(loading)
        wait_for(lambda: child.state.status == "empty")
    assert "was stopped: no model is loaded" in child.state.message
    monkeypatch.setattr(runner, "_exchange", exchange)
    child.submit(LoadRequest(str(backbone)))
    wait_for(lambda: child.state.status == "ready", 240)


def test_a_load_that_waits_is_taken_back(child: Session, backbone: Path) -> None:
    job = child.submit(Reply("hi", GenerationSettings(max_new_tokens=200, seed=1)))
    wait_for(lambda: job.trace)
    child.cancel(child.submit(LoadRequest("nobody/nothing")))
    assert job.done.wait(240)
    assert child.state.status == "ready" and child.state.message == ""
