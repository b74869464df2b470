"""The Models tab without a browser: rows, memory, the background look-ups, a load from click to
model, and who may do what."""

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.hub_files import use, weights
from support.hub_server import Fault, HubRepo, serving
from support.scripted import ScriptedRunner

from medusa_chat import hub
from medusa_chat.checkpoints.inspection import Inspection
from medusa_chat.checkpoints.memory_estimate import Estimate
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.hub.catalog import model_preset, model_presets
from medusa_chat.messages import DeviceMemory, LoadPhase, LoadRequest
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.requests import Reply, Switch
from medusa_chat.runtime.runner import WorkerGone
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import GUEST
from medusa_chat.ui.models.load_form import Asked, asked_of, request_of
from medusa_chat.ui.models.load_view import for_page, loaded_view, pick_view
from medusa_chat.ui.models.memory_fit import Machine, bytes_for, cells, estimates, fit_of, warning
from medusa_chat.ui.models.model_catalog import Detail, Key, ModelCatalog, Place, look_up
from medusa_chat.ui.models.picker import Pick, Picker
from medusa_chat.ui.models.rows import Entry, grouped, row_view
from medusa_chat.ui.models.tab import ModelsController, Seen, first_rows

GB = 10**9
PARTS = Estimate(weights=4 * GB, heads=GB, cache=2 * GB, step=GB // 10, device=GB)
NEW = LoadRequest("someone/new-medusa")
OWNER = SimpleNamespace(headers={}, username=None)
VISITOR = SimpleNamespace(headers={}, username=GUEST)
BOXES = ("", "", "auto", "auto")


def wait_for(what, seconds=60):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
    return found


def report(**changes) -> Inspection:
    """What an inspection finds of a backbone that reads 8192 tokens."""
    memory = dict.fromkeys(("fp32", "fp16", "int8", "nf4"), PARTS)
    values = ("x/y", None, None, "x/base", False, 0, 0, "llama", 8192, 64, memory, (), ())
    return replace(Inspection(*values), **changes)


def machine(free: float, device: str = "cuda:0") -> Machine:
    return Machine(DeviceMemory(device, int(free * GB), 24 * GB), Place(device))


def fact(row: dict, label: str) -> str | None:
    return dict(row["facts"]).get(label)


# ---- what is shown before any click ----


def test_every_preset_is_shown_at_once_with_all_its_figures_and_no_network():
    rows = {row["id"]: row for row in json.loads(first_rows())["rows"]}
    assert list(rows)[0] == "demo" and set(rows) == {"demo", *(p.id for p in model_presets())}
    for preset in model_presets():
        row = rows[preset.id]
        assert fact(row, "base") == (preset.base or "its own")
        assert fact(row, "heads") and fact(row, "layout") == preset.layout
        assert fact(row, "licence") == preset.licence
        assert [cell["precision"] for cell in row["memory"]] == ["fp32", "fp16", "int8", "nf4"]
        assert all(cell["size"] for cell in row["memory"])
        if preset.bytes:
            assert row["download"].startswith("about ")


def test_a_row_tells_what_was_looked_up_rather_than_what_the_preset_says():
    preset = model_preset("FasterDecoding/medusa-vicuna-7b-v1.3")
    found = report(name=preset.id, is_here=True, backbone="someone/else")
    row = row_view("known", Entry(preset.id, preset, detail=Detail(found)), Asked(), Machine())
    assert row["is_here"] and row["download"] == "nothing to download"
    assert fact(row, "base") == "someone/else"


def test_memory_follows_the_context_up_to_what_the_model_reads():
    at = [bytes_for(PARTS, 8192, context) for context in (1024, 8192, 99_999)]
    assert at[0] < at[1] == at[2] == PARTS.total
    assert PARTS.total - at[0] == pytest.approx(PARTS.cache * 7168 / (8192 + 256), rel=0.05)


def test_a_row_is_estimated_for_this_device_looked_up_or_not(tmp_path):
    preset = model_preset("FasterDecoding/medusa-vicuna-7b-v1.3")
    cpu, gpu = (estimates(None, preset, 4096, Place(device)) for device in ("cpu", "cuda"))
    assert gpu["nf4"] > cpu["nf4"] and cpu["fp32"] > gpu["fp32"]  # its context; laid out twice
    there, here = (look_up(Key("demo"), False, Place(d)).report for d in ("cuda", "cpu"))
    assert there.memory["nf4"].device and not here.memory["nf4"].device


def test_each_fit_has_a_word_and_not_only_a_colour():
    for free, fit, word in (
        (20, "fits", "fits"),
        (8.5, "tight", "tight"),
        (5, "large", "too large"),
    ):
        assert fit_of(8 * GB, machine(free).memory) == fit
        shown = cells({"fp16": 8 * GB, "int8": 8 * GB, "nf4": 8 * GB}, machine(free), "bf16")
        assert [cell["word"] for cell in shown] == [word] * 3
        assert [cell["chosen"] for cell in shown] == [True, False, False]
    assert fit_of(8 * GB, None) == ""


def test_a_load_that_will_not_fit_is_confirmed_with_what_would_fit():
    needed = {"fp16": 16 * GB, "int8": 9 * GB, "nf4": 6 * GB}
    shown = cells(needed, machine(8), "fp16")
    assert "choose nf4" in warning(shown, "fp16") and "16 GB" in warning(shown, "fp16")
    assert warning(cells(needed, machine(8), "nf4"), "nf4") == ""
    assert warning(shown, "auto") == ""  # something fits
    assert "smaller model" in warning(cells(needed, machine(2), "auto"), "auto")
    assert warning(cells(needed, Machine(), "fp16"), "fp16") == ""  # nobody knows


def test_words_filter_what_is_known_and_an_id_has_a_row_of_its_own():
    cached = [hub.CachedModel("me/mine", 5, 0, True, True, "main", None, 0.0)]
    found = [
        hub.Found("them/vicuna-heads", 7, 0, True, "", "x"),
        hub.Found("me/mine", 1, 0, 0, "", ""),
    ]
    everything = grouped(Asked(), model_presets(), cached, found)
    assert [e.id for e in everything.found] == ["them/vicuna-heads", "me/mine"]
    assert everything.here == [] and everything.found[1].cached  # each one once
    few = grouped(Asked("33b VICUNA"), model_presets(), cached, [])
    assert len(few.known) == 2 and all("33b" in e.id for e in few.known) and few.here == []
    one = grouped(Asked("some/body"), model_presets(), cached, [])
    assert [e.id for e in one.typed] == ["some/body"] and one.known == []
    preset = model_presets()[3]
    assert grouped(Asked(preset.id.upper()), model_presets(), [], []).typed[0].preset is preset


def test_gated_licence_and_downloads_are_told(monkeypatch):
    found = hub.Found("a/b", 4321, 0, True, "", "x")
    row = row_view("found", Entry("a/b", found=found), Asked(), Machine())
    assert fact(row, "gated") == "yes" and fact(row, "downloads") == "4,321"
    assert row["download"] == "looking …" and row["page"].endswith("/a/b")
    closed = Detail(error="a/b is gated: accept its licence", link="http://page", kind="gated")
    row = row_view("found", Entry("a/b", found=found, detail=closed), Asked(), Machine())
    assert "not accepted" in fact(row, "gated") and row["remedy"] == "http://page"
    assert "gated" in row["problem"]


def test_what_is_in_use_has_no_delete():
    model = hub.CachedModel("a/b", 5 * GB, 0, True, True, "main", None, 0.0)
    row = row_view("here", Entry("a/b", cached=model), Asked(), Machine())
    assert row["delete"] == "Delete 5 GB" and "frees 5 GB" in row["deletion"]
    used = Machine(in_use=frozenset({"a/b"}))
    assert row_view("here", Entry("a/b", cached=model), Asked(), used)["delete"] == ""


def test_errors_speak_of_the_page_and_not_of_a_command_line():
    said = "it names no backbone: give --backbone ID|DIR, a model of hidden size 64"
    assert (
        for_page(said) == "it names no backbone: name another backbone, a model of hidden size 64"
    )


def test_estimate_and_measured_memory_stand_side_by_side():
    info = replace(ScriptedRunner().model, memory_bytes=7 * GB, context=8192, precision="bf16")
    view = loaded_view(info, LoadRequest("x/y"), Detail(report()))
    assert (view["estimated"], view["measured"], view["ratio"]) == ("7 GB", "7 GB", "100 %")
    assert loaded_view(info, None, None)["estimated"] == ""
    assert loaded_view(None, None, None) is None


def test_a_download_tells_bytes_speed_and_time_left():
    event = hub.DownloadEvent("download", "a.bin", GB, 4 * GB, 5e7, 60.0)
    view = pick_view(Pick(NEW, "downloading", download=event))
    assert view["figures"] == "1 GB of 4 GB · 50 MB/s · 1:00 left · a.bin" and view["part"] == 0.25
    assert "2 answers" in pick_view(Pick(NEW, "loading"), ahead=2)["text"]


# ---- what is posted ----


@pytest.mark.parametrize(
    "name, boxes, said",
    [
        ("", ("", "auto", "auto"), "choose a checkpoint"),
        (7, ("", "auto", "auto"), "choose a checkpoint"),
        ("a\x00b", ("", "auto", "auto"), "choose a checkpoint"),
        ("a/b", ("", "fp8", "auto"), "precision"),
        ("a/b", (None, "auto", "auto"), "backbone"),
        ("a/b", ("x\ny", "auto", "auto"), "backbone"),
        ("a/b", ("", "auto", "4"), "context"),
        ("a/b", ("", "auto", "²"), "context"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(name, boxes, said):
    with pytest.raises(UsageError, match=said) as caught:
        request_of(name, boxes, LoadRequest())
    assert "\n" not in str(caught.value)


def test_a_load_keeps_the_device_and_the_limits_of_the_start():
    start = LoadRequest("demo", device="cuda:1", max_context=512, offline=True)
    request = request_of("a/b", ("", "nf4", "auto"), start)
    assert request == LoadRequest("a/b", None, "nf4", "cuda:1", 512, True)
    assert request_of("a/b", ("c/d", "nf4", "8192"), start, 2048).max_context == 2048
    assert asked_of(None, 3, [], {}) == Asked()


# ---- looking things up ----


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub with a checkpoint that holds bytes only: to be fetched, not to be loaded."""
    files = {
        "config.json": json.dumps({"base_model_name_or_path": "someone/base"}).encode(),
        "medusa_lm_head.safetensors": weights(400_000, 3),
        "README.md": b"---\nlicense: apache-2.0\n---\nabout",
    }
    with serving({"someone/new-medusa": HubRepo(files, downloads=9)}) as running:
        use(running, monkeypatch, tmp_path)
        yield running


def test_a_missing_repo_is_one_line_and_what_is_offline_asks_nobody(server):
    there = look_up(Key("someone/nothing"), True)
    assert "someone/nothing" in there.error and there.kind == "missing" and "\n" not in there.error
    asked = len(server.requests)
    assert "not in the cache" in look_up(Key("someone/new-medusa"), False).error
    assert len(server.requests) == asked


def test_a_gated_repo_says_where_to_accept(server):
    server.repos["someone/new-medusa"].gated = "auto"
    detail = look_up(Key("someone/new-medusa"), True)
    assert detail.kind == "gated" and detail.link and "accept its licence" in detail.error


def test_a_search_shows_what_was_found_before_while_it_asks_again(server):
    shelf = ModelCatalog()
    assert shelf.search("").state == "asking"
    done = wait_for(lambda: (s := shelf.search("")).state == "done" and s)
    assert [repo.id for repo in done.rows] == ["someone/new-medusa"]
    assert shelf.found("MEDUSA new") == done.rows and shelf.found("else") == ()
    server.faults.append(Fault("api/models", "status", status=503))
    again = ModelCatalog()
    assert [repo.id for repo in again.search("").rows] == ["someone/new-medusa"]
    failed = wait_for(lambda: (s := again.search("")).state == "failed" and s)
    assert failed.error and [repo.id for repo in failed.rows] == ["someone/new-medusa"]


def test_rows_are_looked_up_once_each_and_again_when_the_disk_changed():
    asked = []

    def look(key, is_online, place):
        asked.append(key.name)
        return Detail(report())

    shelf = ModelCatalog(look)
    keys = [Key(name) for name in "abcdefgh"]
    shelf.want(keys)
    wait_for(lambda: all(map(shelf.detail, keys)))
    shelf.want(keys)
    wait_for(lambda: shelf._workers == 0)
    assert sorted(asked) == list("abcdefgh")
    shelf.forget()
    assert shelf.detail(keys[0])  # shown until it is looked up again
    shelf.want(keys[:1])
    wait_for(lambda: len(asked) == 9)


def test_a_look_that_breaks_is_shown_in_its_row_and_the_others_go_on():
    def look(key, is_online, place):
        if key.name == "a":
            raise ValueError("odd")
        return Detail(report())

    shelf = ModelCatalog(look)
    shelf.want([Key("a"), Key("b")])
    assert "odd" in wait_for(lambda: shelf.detail(Key("a"))).error
    wait_for(lambda: shelf.detail(Key("b")))


def test_a_hub_that_is_gone_is_not_asked_for_each_row(monkeypatch):
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    seen = []

    def look(key, is_online, place):
        seen.append(is_online)
        return Detail(error="the Hub cannot be reached", kind="network")

    shelf = ModelCatalog(look)
    assert shelf.is_online()
    shelf.look(Key("a"))
    assert not shelf.is_online() and "cannot be reached" in shelf.trouble


# ---- from click to model ----


class Loader(ScriptedRunner):
    """A runner whose loads can be held, refused or killed. loaded: what was asked for, in order."""

    def __init__(self):
        super().__init__(delay=0.001, prefill=0.0, steps=200)
        self.loaded, self.trouble = [], None
        self.gate = threading.Event()
        self.gate.set()

    def load(self, request):
        self._stop.clear()
        self.loaded.append(request.checkpoint)
        yield LoadPhase("read")
        while request.checkpoint != "demo" and not self.gate.wait(0.01):
            if self._stop.is_set():
                raise ModelError("stopped")
        if self.trouble is not None and request.checkpoint != "demo":
            raise self.trouble
        yield LoadPhase("ready", replace(self.model, name=request.checkpoint))


@pytest.fixture
def session():
    made = Session(Loader())
    made.submit(LoadRequest())
    wait_for(lambda: made.state.status == "ready" and made.loaded)
    yield made
    made.runner.gate.set()
    made.close()


def picker_for(session, detail=None) -> Picker:
    return Picker(session, ModelCatalog(lambda key, *_: detail or Detail(report(is_here=True))))


def test_a_choice_is_loaded_and_the_one_before_it_is_gone(session):
    picker = picker_for(session)
    picker.begin(NEW, Key("someone/new-medusa")).join(30)
    assert picker.pick.stage == "done" and picker.pick.model.name == "someone/new-medusa"
    assert session.state.model.name == "someone/new-medusa" and session.loaded == NEW


def test_a_problem_that_is_seen_leaves_the_model_alone(session):
    picker = picker_for(session, Detail(report(), error="the heads are for hidden size 64"))
    picker.begin(NEW, Key("someone/new-medusa")).join(30)
    assert picker.pick.stage == "failed" and "hidden size 64" in picker.pick.error
    assert session.runner.loaded == ["demo"] and session.state.status == "ready"


@pytest.mark.parametrize(
    "trouble, said",
    [
        (ModelError("the heads are broken: fetch them again"), "the heads are broken"),
        (WorkerGone("the model's process ended (signal 9)"), "out of memory"),
        (ValueError("odd"), "unexpected ValueError: odd"),
    ],
)
def test_after_a_load_that_fails_the_model_before_it_is_back(session, trouble, said):
    session.runner.trouble = trouble
    picker = picker_for(session)
    picker.begin(NEW, Key("someone/new-medusa")).join(30)
    assert picker.pick.stage == "failed" and said in picker.pick.error
    wait_for(lambda: session.state.status == "ready")
    assert session.state.model.name == "demo" and session.loaded.checkpoint == "demo"
    assert session.runner.loaded == ["demo", "someone/new-medusa", "demo"]


def test_a_load_waits_for_the_answer_that_runs_and_can_be_given_up_there(session):
    from medusa_chat.decoding.settings import GenerationSettings

    session.runner.hold_at = 5
    job = session.submit(Reply("hi", GenerationSettings(max_new_tokens=400)))
    wait_for(lambda: len(job.trace) > 3)
    picker = picker_for(session)
    picker.begin(NEW, Key("someone/new-medusa"))
    wait_for(lambda: picker.pick.stage == "loading")
    assert session.position(picker.pick.switch) == 1
    picker.cancel()
    assert picker.pick.stage == "stopped" and not job.done.is_set()
    session.runner.hold_at = None
    assert job.done.wait(30) and job.trace[-1].reason != "cancelled"
    assert session.runner.loaded == ["demo"]


def test_a_load_that_is_cancelled_ends_and_the_model_before_it_comes_back(session):
    session.runner.gate.clear()
    picker = picker_for(session)
    thread = picker.begin(NEW, Key("someone/new-medusa"))
    wait_for(lambda: session.runner.loaded[-1] == "someone/new-medusa")
    picker.cancel()
    assert picker.pick.stage == "stopped"
    thread.join(30)
    wait_for(lambda: session.state.status == "ready")
    assert session.state.model.name == "demo" and picker.pick.stage == "stopped"


def test_a_second_load_is_refused_while_one_is_on(session):
    session.runner.gate.clear()
    picker = picker_for(session)
    picker.begin(NEW, Key("someone/new-medusa"))
    with pytest.raises(UsageError, match="someone/new-medusa is being loaded"):
        picker.begin(LoadRequest("x/y"), Key("x/y"))


def test_a_download_is_seen_cancelled_and_goes_on_while_the_model_answers(session, server):
    server.faults.append(Fault("cdn/.*safetensors", "slow", rate=100_000))
    needs = hub.plan("someone/new-medusa", None, None)
    picker = picker_for(session, Detail(report(), needs))
    thread = picker.begin(NEW, Key("someone/new-medusa"))
    wait_for(lambda: picker.pick.download and picker.pick.download.done)
    assert picker.pick.stage == "downloading" and session.state.status == "ready"
    picker.cancel()
    assert picker.pick.stage == "stopped" and "kept" in picker.pick.error
    thread.join(30)
    assert session.runner.loaded == ["demo"]
    left = hub.plan("someone/new-medusa", None, None).left
    assert 0 < left < needs.left
    server.faults.clear()
    wait_for(lambda: not any(t.name == "download" for t in threading.enumerate()))
    again = picker_for(session, Detail(report(), hub.plan("someone/new-medusa", None, None)))
    again.begin(NEW, Key("someone/new-medusa")).join(60)
    assert again.pick.stage == "done", again.pick.error


def test_a_connection_that_breaks_for_good_is_one_line_and_the_model_stays(session, server):
    needs = hub.plan("someone/new-medusa", None, None)
    server.faults.append(Fault("cdn/.*safetensors", "status", status=404))
    picker = picker_for(session, Detail(report(), needs))
    picker.begin(NEW, Key("someone/new-medusa")).join(60)
    assert picker.pick.stage == "failed" and "\n" not in picker.pick.error
    assert session.runner.loaded == ["demo"] and session.state.status == "ready"


# ---- the events ----


@pytest.fixture
def desk(session):
    return ModelsController(session, ModelCatalog(lambda key, *_: Detail(report(is_here=True))))


def event(**data):
    return SimpleNamespace(_data=data)


def test_a_guest_sees_no_rows_and_can_neither_load_nor_cancel_nor_delete(desk, session):
    hits = [
        desk.look(Seen(), *BOXES, VISITOR),
        desk.take(Seen(), *BOXES, event(id="someone/new-medusa"), VISITOR),
        desk.halt(Seen(), *BOXES, VISITOR),
        desk.drop_model(Seen(), *BOXES, event(id="someone/new-medusa"), VISITOR),
    ]
    for _, rows in hits:
        assert json.loads(rows)["rows"] == [] and json.loads(rows)["guest"]
    assert desk.picker.pick == Pick() and session.runner.loaded == ["demo"]
    by_header = SimpleNamespace(headers={"x-medusa-guest": "1"}, username="someone")
    assert json.loads(desk.look(Seen(), *BOXES, by_header)[1])["guest"]


def test_a_tab_is_sent_only_what_it_does_not_show(desk):
    seen = Seen()
    card, rows = desk.look(seen, *BOXES, OWNER)
    assert json.loads(card)["loaded"]["name"] == "demo" and json.loads(rows)["rows"]
    wait_for(
        lambda: desk.session.memory and desk.shelf._workers == 0 and not desk.shelf._is_listing
    )
    desk.look(seen, *BOXES, OWNER)
    again = desk.look(seen, *BOXES, OWNER)
    assert all(isinstance(part, dict) for part in again)  # gr.skip()


def test_a_click_loads_the_row_with_what_the_boxes_say(desk, session):
    boxes = ("", "", "nf4", "2048")
    card, _ = desk.take(Seen(), *boxes, event(id="someone/new-medusa"), OWNER)
    assert json.loads(card)["stage"] != "idle"
    wait_for(lambda: desk.picker.pick.stage == "done")
    assert session.loaded == LoadRequest("someone/new-medusa", None, "nf4", "auto", 2048)


def test_a_preset_is_loaded_with_the_base_it_was_trained_for(desk, session):
    preset = model_preset("leptonai/TinyLlama-1.1B-Chat-v1.0-4heads")
    desk.take(Seen(), *BOXES, event(id=preset.id), OWNER)
    wait_for(lambda: desk.picker.pick.stage == "done")
    assert session.loaded.backbone == preset.base


@pytest.mark.parametrize(
    "posted", [{}, {"id": None}, {"id": ["a"]}, {"id": "../../etc"}, {"id": ""}]
)
def test_what_was_posted_past_the_page_harms_nothing(desk, session, posted, monkeypatch):
    told = []
    monkeypatch.setattr("gradio.Info", told.append)
    monkeypatch.setattr("gradio.Warning", told.append)
    desk.drop_model(Seen(), *BOXES, event(**posted), OWNER)
    assert told and all("\n" not in line for line in told)
    desk.take(Seen(), {}, [], 7, None, event(**posted), OWNER)
    assert session.runner.loaded == ["demo"]


def test_the_model_in_use_cannot_be_deleted(desk, server, monkeypatch):
    told = []
    monkeypatch.setattr("gradio.Warning", told.append)
    desk.take(Seen(), *BOXES, event(id="someone/new-medusa"), OWNER)
    wait_for(lambda: desk.picker.pick.stage == "done")
    desk.drop_model(Seen(), *BOXES, event(id="someone/new-medusa"), OWNER)
    assert told == ["someone/new-medusa is in use: load another model first"]


def test_a_cached_one_is_deleted_and_its_bytes_are_told(desk, server, monkeypatch):
    told = []
    monkeypatch.setattr("gradio.Info", told.append)
    list(hub.pull(hub.plan("someone/new-medusa", None, None)))
    desk.drop_model(Seen(), *BOXES, event(id="someone/new-medusa"), OWNER)
    assert "deleted" in told[0] and "kB" in told[0]
    assert hub.cached() == ()


def test_memory_is_asked_of_the_models_process_in_its_turn(session):
    session.measure_memory()
    assert wait_for(lambda: session.memory) == DeviceMemory("cpu", 8 * GB, 16 * GB)


def test_the_state_after_a_failed_first_load_still_takes_another():
    session = Session(Loader())
    session.runner.trouble = ModelError("no")
    session.submit(LoadRequest("x/broken"))
    wait_for(lambda: session.state.status == "failed")
    session.runner.trouble = None
    switch = session.submit(Switch(LoadRequest()))
    assert switch.done.wait(30) and not switch.error
    assert session.state == ModelState("ready", model=switch.result.model)
    session.close()
