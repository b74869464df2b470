"""The models of last time, and the one that a program begins with."""

import json
from dataclasses import replace

import pytest
from support.hub_files import WHOLE
from support.hub_server import Hub
from support.scripted import ScriptedRunner
from support.waiting import wait_for

from medusa_chat.checkpoints.fetch import fetch
from medusa_chat.cli.ui import Ui
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadPhase, LoadRequest
from medusa_chat.runtime.recent_models import FILE, LONGEST, MOST, RecentModel, RecentModels
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import WorkerGone
from medusa_chat.runtime.session import Session

REAL = LoadRequest("owner/real", precision="int8", max_context=512)


class Loads(ScriptedRunner):
    """Loads what it is asked for, but `broken`, which raises."""

    def __init__(self, broken: Exception | None = None) -> None:
        super().__init__(delay=0.001, prefill=0.001, steps=3)
        self.broken, self.asked = broken, []

    def load(self, request):
        self.asked.append(request)
        yield LoadPhase("read")
        if self.broken and request.checkpoint != "demo":
            raise self.broken
        self.name = request.checkpoint
        yield LoadPhase("ready", self.model)


@pytest.fixture
def recent(tmp_path):
    return RecentModels(tmp_path)


def started(recent, runner, **options):
    """The session of a page that was started like this, once its first load is over."""
    command = Ui(**options)
    request = LoadRequest(options.get("checkpoint", "demo"), device="cpu")
    session = Session(runner, request)
    session.lifecycle.on_loaded = recent.note
    load = command._first_load(session, request, recent)
    assert load.done.wait(60)
    wait_for(lambda: session.state.status in ("ready", "failed") and not session._queue.running)
    wait_for(lambda: not recent._mark.exists())
    return session


def names(recent):
    return [one.request.checkpoint for one in recent.all()]


def test_the_last_model_comes_back_as_it_was(recent):
    recent.note(REAL, Loads().model)
    runner = Loads()
    session = started(recent, runner)
    assert runner.asked == [
        LoadRequest("owner/real", precision="int8", device="cpu", max_context=512, offline=True)
    ]
    assert session.state.model.name == "owner/real" and not session.state.message
    session.close()


def test_a_named_model_wins_and_is_the_last_one_then(recent):
    recent.note(REAL, Loads().model)
    started(recent, Loads(), checkpoint="owner/other").close()
    assert names(recent) == ["owner/other", "owner/real"]
    assert recent.last().request.checkpoint == "owner/other"


def test_options_of_the_start_win_over_what_was_kept(recent):
    recent.note(REAL, Loads().model)
    asked = LoadRequest(precision="bf16", max_context=64, device="cuda")
    assert recent.last().at_start(asked) == replace(asked, checkpoint="owner/real", offline=True)


def test_a_last_model_that_is_gone_gives_the_demo_and_a_line(recent, capsys):
    recent.note(REAL, Loads().model)
    session = started(recent, Loads(ModelError("there is no such folder")))
    assert session.state.model.name == "demo"
    assert session.state.message == ("owner/real: there is no such folder; demo is loaded instead")
    assert "there is no such folder; the demo is loaded instead" in capsys.readouterr().err
    assert recent.last().request == RecentModel.kept_of(REAL), "it may be back at the next start"
    session.close()


class Fetches(Loads):
    """Fetches what it is asked for."""

    def load(self, request):
        for phase, _ in fetch(request) if request.checkpoint != "demo" else ():
            yield phase
        yield from super().load(request)


def test_a_last_model_that_was_deleted_is_not_downloaded_at_the_start(recent, server: Hub):
    recent.note(LoadRequest(WHOLE), Loads().model)
    session = started(recent, Fetches())
    assert session.state.model.name == "demo" and not server.requests
    assert "is not in the cache, and is not downloaded unasked" in session.state.message
    assert not session.started_with.offline, "what the user asks for later may be downloaded"
    session.close()


def test_a_folder_comes_back_from_another_working_folder(recent, tmp_path, monkeypatch):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "draft.gguf").touch()
    monkeypatch.chdir(tmp_path)
    asked = LoadRequest("mine/model", backbone="owner/base", drafts=("draft.gguf", "owner/other"))
    recent.note(asked, Loads().model)
    monkeypatch.chdir(tmp_path / "mine")
    kept = recent.last().request
    assert kept.checkpoint == str(tmp_path / "mine" / "model")
    assert kept.drafts == (str(tmp_path / "draft.gguf"), "owner/other")
    assert kept.backbone == "owner/base"


@pytest.mark.parametrize(("before", "now"), [("owner/draft", ("owner/draft",)), (None, ())])
def test_a_list_of_when_there_was_one_drafter_is_read(recent, before, now):
    recent.note(REAL, Loads().model)
    values = json.loads(recent.file.read_text())
    del values["models"][0]["drafts"]
    values["models"][0]["draft"] = before
    recent.file.write_text(json.dumps(values))
    assert recent.last().request.drafts == now


@pytest.mark.parametrize("name", ["demo", "smollm2", "owner/real"])
def test_a_name_that_is_no_path_stays_as_typed(tmp_path, monkeypatch, name):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert RecentModel.kept_of(LoadRequest(name)).checkpoint == name


def test_a_last_model_that_ends_its_process_is_not_tried_at_each_start(recent):
    recent.note(REAL, Loads().model)
    runner = Loads(WorkerGone("the model's process exited unexpectedly (killed)"))
    session = started(recent, runner)
    assert session.state.model.name == "demo" and "exited unexpectedly" in session.state.message
    assert [one.checkpoint for one in runner.asked] == ["owner/real", "demo"]
    session.close()
    wait_for(lambda: recent.last() is None)
    assert names(recent) == ["owner/real"], "one click loads it"
    again = Loads()
    started(recent, again).close()
    assert [one.checkpoint for one in again.asked] == ["demo"]


def test_a_last_model_that_took_the_program_with_it_gives_the_demo_and_a_line(recent, tmp_path):
    recent.note(REAL, Loads().model)
    killed = RecentModels(tmp_path)
    assert not killed.begin()
    killed._lock.release()  # as the system does for a process that is killed
    session = started(recent, Loads())
    assert session.state.model.name == "demo" and "was ended while" in session.state.message
    session.close()
    assert recent.last() is None


def test_a_model_that_another_program_loads_just_now_is_no_model_that_ended_it(recent, tmp_path):
    recent.note(REAL, Loads().model)
    other = RecentModels(tmp_path)
    assert not other.begin() and not recent.begin()
    recent.end()
    assert other._mark.exists(), "the mark is that of the other"
    other.end()
    assert not other._mark.exists()


def test_a_message_of_the_load_waits_for_the_demo_that_comes_instead(recent):
    recent.note(REAL, Loads().model)
    runner = Loads(ModelError("gone"))
    session = Session(runner, LoadRequest())
    Ui()._first_load(session, LoadRequest(), recent)
    said = session.submit(Reply("hello", GenerationSettings(max_new_tokens=8, seed=1)))
    assert said.done.wait(60) and not said.error and said.trace
    session.close()


def test_the_list_is_short_and_has_each_model_once(recent):
    for number in [*range(MOST + 3), 5]:
        recent.note(LoadRequest(f"owner/{number}"), Loads().model)
    assert len(names(recent)) == MOST and names(recent)[0] == "owner/5"
    assert len(set(names(recent))) == MOST
    recent.forget(recent.all()[0].request.checkpoint)
    assert len(names(recent)) == MOST - 1


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"models": [{}]}',
        '{"models": null}',
        '{"models": [7]}',
        json.dumps({"models": [{**RecentModel(REAL, "x").to_json(), "max_context": "9"}]}),
        json.dumps({"models": [{**RecentModel(REAL, "x").to_json(), "checkpoint": ""}]}),
        json.dumps({"models": [{**RecentModel(REAL, "x").to_json(), "drafts": "one"}]}),
        json.dumps({"models": [{**RecentModel(REAL, "x").to_json(), "drafts": [7]}]}),
        "\xff",
    ],
)
def test_a_damaged_list_is_told_and_stops_nothing(tmp_path, text):
    told = []
    recent = RecentModels(tmp_path, told.append)
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    assert recent.all() == [] and recent.last() is None
    assert len(told) == 1 and "cannot be read" in told[0]
    recent.note(REAL, Loads().model)
    assert names(recent) == ["owner/real"]


def test_a_damaged_entry_costs_no_other(tmp_path):
    told = []
    recent = RecentModels(tmp_path, told.append)
    for name in ("owner/a", "owner/b"):
        recent.note(LoadRequest(name), Loads().model)
    values = json.loads((tmp_path / FILE).read_text())
    values["models"].insert(1, {"checkpoint": 7})
    (tmp_path / FILE).write_text(json.dumps(values))
    assert names(recent) == names(recent) == ["owner/b", "owner/a"]
    assert len(told) == 1 and "a recent model cannot be read" in told[0]


def test_a_name_that_is_too_long_to_be_read_is_not_kept(recent):
    recent.note(REAL, Loads().model)
    recent.note(LoadRequest(f"owner/{'x' * LONGEST}"), Loads().model)
    recent.note(LoadRequest("owner/other"), replace(Loads().model, name="x" * LONGEST * 2))
    assert names(recent) == ["owner/real"]


def test_with_a_deleted_repo_go_its_files_and_nothing_else(recent):
    for name in ("owner/real/a.gguf", "owner/real", "owner/realistic"):
        recent.note(LoadRequest(name), Loads().model)
    recent.forget("owner/real")
    assert names(recent) == ["owner/realistic"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    told = []
    (tmp_path / "file").write_text("")
    recent = RecentModels(tmp_path / "file", told.append)
    recent.note(REAL, Loads().model)
    assert "cannot be written" in told[-1]
