"""The Models tab without a browser: rows, memory, the background look-ups, a load from click to
model, and who may do what."""

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import httpx
from support.hub_files import use, weights
from support.hub_server import Fault, HubRepo, serving
from support.scripted import ScriptedRunner
from support.waiting import wait_for

from medusa_chat import hub
from medusa_chat.checkpoints.inspection import Inspection
from medusa_chat.checkpoints.memory_needs import PLAIN_CPU, Estimate
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.gguf_files import LocalGguf, is_gguf
from medusa_chat.hub.catalog import model_preset, model_presets
from medusa_chat.hub.client import hub_errors
from medusa_chat.messages import DeviceMemory, LoadPhase, LoadRequest
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.recent_models import RecentModels
from medusa_chat.runtime.requests import Reply, Switch
from medusa_chat.runtime.runner import WorkerGone
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import GUEST
from medusa_chat.ui.models.checkpoint_lookup import CheckpointKey, Detail, MemoryTarget, look_up
from medusa_chat.ui.models.controller import ModelsController
from medusa_chat.ui.models.entries import Entry, grouped
from medusa_chat.ui.models.load_form import LoadChoices, choices_of, request_of
from medusa_chat.ui.models.memory_fit import (
    Machine,
    cells,
    estimates,
    fit_of,
    precision_taken,
    warning,
)
from medusa_chat.ui.models.model_catalog import ModelCatalog
from medusa_chat.ui.models.picker import (
    LoadProgress,
    ModelPicker,
    for_page,
    loaded_view,
    progress_card,
)
from medusa_chat.ui.models.rows import offer, row_view
from medusa_chat.ui.models.tab import first_rows
from medusa_chat.ui.models.view import ModelsTab
from medusa_chat.ui.page.status import part_of

GB = 10**9
PARTS = Estimate(weights=4 * GB, heads=GB, cache=2 * GB, step=GB // 10, program=GB)
NEW = LoadRequest("someone/new-medusa")
OWNER = SimpleNamespace(headers={}, username=None)
VISITOR = SimpleNamespace(headers={}, username=GUEST)
BOXES = ("", "", "auto", "auto")


def report(**changes) -> Inspection:
    """What an inspection finds of a backbone that reads 8192 tokens."""
    memory = dict.fromkeys(("fp32", "bf16", "fp16", "int8", "nf4"), PARTS)
    values = ("x/y", None, None, "x/base", False, 0, 0, "llama", 8192, 64, memory, (), ())
    return replace(Inspection(*values, usual_context=8192), **changes)


def machine(free: float, device: str = "cuda:0") -> Machine:
    return Machine(DeviceMemory(device, int(free * GB), 24 * GB), MemoryTarget(device))


def fact(row: dict, label: str) -> str | None:
    return dict(row["facts"]).get(label)


# ---- what is shown before any click ----


def test_every_preset_is_shown_at_once_with_all_its_figures_and_no_network():
    rows = {row["id"]: row for row in json.loads(first_rows())["rows"]}
    first = ["smollm2", "qwen-coder", "qwen-coder-0.5b", "demo"]
    assert list(rows)[:4] == first and set(rows) == {
        "demo",
        *(p.id for p in model_presets()),
    }
    for preset in model_presets():
        row = rows[preset.id]
        assert fact(row, "backbone") == (preset.base or "its own")
        assert fact(row, "heads")
        assert fact(row, "licence") == preset.licence
        rounded = [] if is_gguf(preset.base or "") else ["int8", "nf4"]  # a file is not rounded
        assert [cell["precision"] for cell in row["memory"]] == ["fp32", "bf16", *rounded]
        assert all(cell["size"] for cell in row["memory"])
        if preset.bytes:
            assert row["download"].startswith("about ")


def test_a_row_tells_what_was_looked_up_rather_than_what_the_preset_says():
    preset = model_preset("FasterDecoding/medusa-vicuna-7b-v1.3")
    found = report(name=preset.id, is_here=True, backbone="someone/else")
    row = row_view(
        "known", Entry(preset.id, preset, detail=Detail(found)), LoadChoices(), Machine()
    )
    assert row["is_here"] and row["download"] == "nothing to download"
    assert fact(row, "backbone") == "someone/else"


@pytest.mark.parametrize(
    ("typed", "loaded_on", "is_loaded"),
    [
        (None, None, True),
        (None, "HuggingFaceTB/SmolLM2-135M-Instruct", True),
        (None, "some.gguf", False),
        ("some.gguf", "some.gguf", True),
        ("other", "some.gguf", False),
        ("other", None, False),
    ],
)
def test_a_row_is_loaded_on_the_backbone_that_is_asked_for_now(typed, loaded_on, is_loaded):
    preset = model_preset("smollm2")
    machine = Machine(loaded=LoadRequest("smollm2", loaded_on))
    row = row_view("known", Entry("smollm2", preset), LoadChoices(backbone=typed), machine)
    assert row["is_loaded"] == is_loaded
    assert row["download"] == ("nothing to download" if is_loaded else "about 269 MB to download")
    other = row_view("known", Entry("demo"), LoadChoices(), machine)
    assert not other["is_loaded"]
    own = Machine(loaded=LoadRequest("me/heads", "x/backbone"))
    assert not row_view("here", Entry("me/heads"), LoadChoices(), own)["is_loaded"]


def test_memory_follows_the_context_up_to_what_the_model_reads():
    at = [PARTS.at_context(8192, context).total for context in (1024, 8192, 99_999)]
    assert at[0] < at[1] == at[2] == PARTS.total
    assert PARTS.total - at[0] == pytest.approx(PARTS.cache * 7168 / (8192 + 256), rel=0.05)

    usual = estimates(report(usual_context=1024), None, None, MemoryTarget())  # of longrope
    assert {parts.total for parts in usual.values()} == {at[0]}


def test_a_row_is_estimated_for_this_device_looked_up_or_not(tmp_path):
    preset = model_preset("FasterDecoding/medusa-vicuna-7b-v1.3")
    cpu, gpu = (estimates(None, preset, 4096, MemoryTarget(device)) for device in ("cpu", "cuda"))
    assert gpu["nf4"].total > cpu["nf4"].total  # its context
    assert cpu["fp32"].held > gpu["fp32"].held  # laid out twice
    there, here = (
        look_up(CheckpointKey("demo"), False, MemoryTarget(d)).report for d in ("cuda", "cpu")
    )
    assert there.memory["nf4"].gaps and not here.memory["nf4"].gaps


def test_heads_for_a_gguf_file_tell_before_a_download_what_it_takes_as_it_is():
    target = MemoryTarget("cpu", PLAIN_CPU._replace(has_compiler=True))
    needed = estimates(None, model_preset("qwen-coder"), None, target)
    assert list(needed) == ["Q4_K_M", "fp32", "bf16", "fp16"]
    small = Machine(DeviceMemory("cpu", 3 * GB, 8 * GB), target)
    assert precision_taken(needed, small, "auto") == "Q4_K_M"
    held = 1.84 * GB  # what a program that had loaded this file held
    assert needed["Q4_K_M"].total == pytest.approx(held, rel=0.1)


def test_each_fit_has_a_word_and_not_only_a_colour():
    for free, fit, word in (
        (20, "fits", "fits"),
        (8, "tight", "tight"),
        (5, "large", "too large"),
    ):
        assert fit_of(PARTS, machine(free).memory) == fit  # beside the program, 7.1 GB
        shown = cells(dict.fromkeys(("bf16", "int8", "nf4"), PARTS), machine(free), "bf16")
        assert [cell["word"] for cell in shown] == [word] * 3
        assert [cell["chosen"] for cell in shown] == [True, False, False]
    assert fit_of(PARTS, None) == ""


def test_a_load_that_will_not_fit_is_confirmed_with_what_would_fit():
    sizes = {"fp16": 16, "int8": 9, "nf4": 6}
    needed = {p: Estimate(size * GB, 0, 0, 0, 0) for p, size in sizes.items()}
    shown = cells(needed, machine(8), "fp16")
    assert "choose nf4" in warning(shown, "fp16") and "16 GB" in warning(shown, "fp16")
    assert warning(cells(needed, machine(8), "nf4"), "nf4") == ""
    assert warning(shown, "auto") == ""  # something fits
    assert "smaller model" in warning(cells(needed, machine(2), "auto"), "auto")
    assert warning(cells(needed, Machine(), "fp16"), "fp16") == ""  # nobody knows


def test_words_filter_what_is_known_and_an_id_has_a_row_of_its_own():
    cached = [hub.CachedModel("me/mine", 5, 0, True, True, "main", None, 0.0)]
    found = [
        hub.SearchResult("them/vicuna-heads", 7, 0, True, "", "x"),
        hub.SearchResult("me/mine", 1, 0, 0, "", ""),
    ]
    everything = grouped(LoadChoices(), model_presets(), cached, found)
    assert [e.id for e in everything.found] == ["them/vicuna-heads", "me/mine"]
    assert everything.here == [] and everything.found[1].cached  # each one once
    few = grouped(LoadChoices("33b VICUNA"), model_presets(), cached, [])
    assert len(few.known) == 2 and all("33b" in e.id for e in few.known) and few.here == []
    one = grouped(LoadChoices("some/body"), model_presets(), cached, [])
    assert [e.id for e in one.typed] == ["some/body"] and one.known == []
    preset = model_presets()[3]
    assert (
        grouped(LoadChoices(preset.id.upper()), model_presets(), [], []).typed[0].preset is preset
    )


def test_the_model_whose_heads_ship_stands_first_and_is_one_with_its_backbone():
    base = model_preset("smollm2").base
    cached = [hub.CachedModel(base, 269_000_000, 0, True, False, "main", None, 0.0)]
    groups = grouped(LoadChoices(), model_presets(), cached, [])
    first = groups.known[0]
    row = row_view("known", first, LoadChoices(), Machine())
    said = "SmolLM2 135M: small and real, 269 MB, heads ship with medusa-chat"
    assert row["title"] == said and row["ships"] and row["page"].endswith(base)
    assert groups.here == [] and row["delete"] == "Delete 269 MB"
    assert (
        row_view("known", first, LoadChoices(), Machine(in_use=frozenset({base})))["delete"] == ""
    )
    assert first.key(None) == CheckpointKey("smollm2", base)


def test_heads_for_a_gguf_file_on_the_hub_are_one_with_its_repo():
    base = model_preset("qwen-coder-0.5b").base
    repo = base.rpartition("/")[0]
    cached = [hub.CachedModel(repo, 491_000_000, 0, True, False, "main", None, 0.0)]
    groups = grouped(LoadChoices(), model_presets(), cached, [])
    entry = groups.known[2]
    row = row_view("known", entry, LoadChoices(), Machine())
    said = "Qwen2.5 Coder 0.5B: writes small programs, 491 MB, heads ship with medusa-chat"
    assert row["title"] == said and row["page"].endswith(repo)
    assert groups.here == [] and row["delete"] == "Delete 491 MB"
    assert entry.key(None) == CheckpointKey("qwen-coder-0.5b", base)
    local = [LocalGguf("/models/qwen2.5-coder-0.5b-instruct.Q8_0.gguf", 9, "LM Studio")]
    beside = grouped(LoadChoices(), model_presets(), [], [], local).known[2]
    assert beside.key(None) == CheckpointKey("qwen-coder-0.5b", local[0].path)


def test_a_gguf_file_of_another_program_serves_heads_that_ship_until_their_backbone_is_here():
    base = model_preset("smollm2").base
    files = [
        LocalGguf(f"/models/{name}.gguf", 9, "LM Studio")
        for name in ("x", "smollm2-135m-instruct-q8_0")
    ]
    groups = grouped(LoadChoices(), model_presets(), [], [], files)
    assert groups.known[0].key(None) == CheckpointKey("smollm2", files[1].path)
    assert groups.known[0].key("a/b") == CheckpointKey("smollm2", "a/b")
    cached = [hub.CachedModel(base, 9, 0, True, False, "main", None, 0.0)]
    groups = grouped(LoadChoices(), model_presets(), cached, [], files)
    assert groups.known[0].key(None) == CheckpointKey("smollm2", base)


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "~/nope", "./x", "../y", "C:\\models", "\\\\nas\\m"]
)
def test_a_path_that_is_not_there_has_a_row_that_says_so(name):
    groups = grouped(LoadChoices(name), model_presets(), [], [])
    assert [entry.id for entry in groups.typed] == [name] and not groups.known
    entry = groups.typed[0]
    entry.detail = look_up(CheckpointKey(name), True)
    row = row_view("typed", entry, LoadChoices(name), Machine())
    said = row["problem"]
    assert name in said and "network" not in said and row["is_refused"]


def test_a_file_is_told_apart_from_a_folder(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    assert "is a file" in look_up(CheckpointKey(str(file)), True).error


def test_an_id_that_cannot_be_asked_for_now_says_nothing_of_offline(monkeypatch):
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    detail = look_up(CheckpointKey("someone/heads"), False)
    assert detail.kind == "network" and "--offline" not in detail.error
    row = row_view("typed", Entry("someone/heads", detail=detail), LoadChoices(), Machine())
    assert not row["is_refused"]  # another try may succeed


@pytest.mark.parametrize("reason", ["[Errno -2] Name or service not known", "[Errno 101] no route"])
def test_the_networks_own_words_are_translated(reason):
    with pytest.raises(hub.HubError) as refused, hub_errors("a/b"):
        raise httpx.ConnectError(reason)
    assert "Errno" not in str(refused.value) and "cannot be reached" in str(refused.value)


def test_gated_licence_and_downloads_are_told(monkeypatch):
    found = hub.SearchResult("a/b", 4321, 0, True, "", "x")
    row = row_view("found", Entry("a/b", found=found), LoadChoices(), Machine())
    assert fact(row, "gated") == "yes" and fact(row, "downloads") == "4,321"
    assert row["download"] == "looking …" and row["page"].endswith("/a/b")
    closed = Detail(error="a/b is gated: accept its licence", link="http://page", kind="gated")
    row = row_view("found", Entry("a/b", found=found, detail=closed), LoadChoices(), Machine())
    assert "not accepted" in fact(row, "gated") and row["remedy"] == "http://page"
    assert "gated" in row["problem"]


def test_what_is_in_use_has_no_delete():
    model = hub.CachedModel("a/b", 5 * GB, 0, True, True, "main", None, 0.0)
    row = row_view("here", Entry("a/b", cached=model), LoadChoices(), Machine())
    assert row["delete"] == "Delete 5 GB" and "frees 5 GB" in row["deletion"]
    used = Machine(in_use=frozenset({"a/b"}))
    assert row_view("here", Entry("a/b", cached=model), LoadChoices(), used)["delete"] == ""


def test_without_a_network_nothing_is_offered_that_would_be_downloaded(monkeypatch, tmp_path):
    known = Entry("x/y", preset=model_preset("smollm2"))
    off, cached = Machine(is_offline=True), hub.CachedModel("x/y", 5, 0, True, True, "m", None, 0.0)
    row = row_view("known", known, LoadChoices(), off)
    assert row["is_away"] and row["download"] == "about 269 MB to download: the network is off"
    assert not row_view("known", known, LoadChoices(), Machine())["is_away"]
    for here in (
        Entry("demo"),
        Entry(str(tmp_path)),
        Entry("x/y", cached=cached),
        Entry("x/y", preset=known.preset, beside="/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ):
        assert not row_view("known", here, LoadChoices(), off)["is_away"]
    assert {row["id"] for row in json.loads(first_rows())["rows"] if not row["is_away"]} == {"demo"}
    monkeypatch.setattr("medusa_chat.ui.models.rows.local_backbone", lambda preset: None)
    assert offer()["id"] == ""
    monkeypatch.setattr("medusa_chat.ui.models.rows.is_offline", lambda: False)
    assert offer()["id"] == "smollm2" and "MB" in offer()["text"]


def test_errors_speak_of_the_page_and_not_of_a_command_line():
    said = "it does not name a backbone: give --backbone ID|DIR, a model of hidden size 64"
    assert (
        for_page(said)
        == "it does not name a backbone: name another backbone, a model of hidden size 64"
    )
    said = "the Hub cannot be reached: check the network and try again, or use --offline"
    assert for_page(said) == "the Hub cannot be reached: check the network and try again"


def test_the_loaded_model_is_shown_with_its_memory():
    info = replace(ScriptedRunner().model, memory_bytes=7 * GB, memory=PARTS.words)
    assert loaded_view(info, LoadRequest("x/y"))["memory"] == PARTS.words
    assert loaded_view(replace(info, memory=""), None)["memory"] == "7 GB"
    assert loaded_view(None, None) is None


def test_a_download_tells_bytes_speed_and_time_left():
    event = hub.DownloadEvent("download", "a.bin", GB, 4 * GB, 5e7, 60.0)
    view = progress_card(LoadProgress(NEW, "downloading", download=event))
    assert view["figures"] == "1 GB of 4 GB · 50 MB/s · 1:00 left · a.bin" and view["part"] == 0.25
    loading = LoadProgress(NEW, "loading")
    assert "2 answers" in progress_card(loading, ahead=2, part=0.5)["text"]
    assert progress_card(loading, ahead=2, part=0.5)["part"] is None
    assert progress_card(loading, phase="converting", part=0.5)["part"] == 0.5
    assert part_of(ModelState("loading", phase="download", done=30, total=40)) == 0.75
    assert part_of(ModelState("loading", phase="warm up")) > 0.5


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
    assert choices_of(None, 3, [], {}) == LoadChoices()
    quoted = '"C:\\models\\my file.gguf"'
    assert request_of(quoted, ("'/a b'", "nf4", "auto"), start).checkpoint == quoted[1:-1]
    assert choices_of(f" {quoted} ", "", "nf4", "auto").text == quoted[1:-1]


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
    there = look_up(CheckpointKey("someone/nothing"), True)
    assert "someone/nothing" in there.error and there.kind == "missing" and "\n" not in there.error
    asked = len(server.requests)
    assert "not on this disk" in look_up(CheckpointKey("someone/new-medusa"), False).error
    assert len(server.requests) == asked


def test_a_gated_repo_says_where_to_accept(server):
    server.repos["someone/new-medusa"].gated = "auto"
    detail = look_up(CheckpointKey("someone/new-medusa"), True)
    assert detail.kind == "gated" and detail.link and "accept its licence" in detail.error


def test_a_search_shows_what_was_found_before_while_it_asks_again(server):
    catalog = ModelCatalog()
    assert catalog.search("").state == "asking"
    done = wait_for(lambda: (s := catalog.search("")).state == "done" and s)
    assert [repo.id for repo in done.rows] == ["someone/new-medusa"]
    assert catalog.found("MEDUSA new") == done.rows and catalog.found("else") == ()
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

    catalog = ModelCatalog(look)
    keys = [CheckpointKey(name) for name in "abcdefgh"]
    catalog.want(keys)
    wait_for(lambda: all(map(catalog.detail, keys)))
    catalog.want(keys)
    wait_for(lambda: catalog._workers == 0)
    assert sorted(asked) == list("abcdefgh")
    catalog.forget()
    assert catalog.detail(keys[0])  # shown until it is looked up again
    catalog.want(keys[:1])
    wait_for(lambda: len(asked) == 9)


def test_a_look_that_breaks_is_shown_in_its_row_and_the_others_go_on():
    def look(key, is_online, place):
        if key.name == "a":
            raise ValueError("odd")
        return Detail(report())

    catalog = ModelCatalog(look)
    catalog.want([CheckpointKey("a"), CheckpointKey("b")])
    assert "odd" in wait_for(lambda: catalog.detail(CheckpointKey("a"))).error
    wait_for(lambda: catalog.detail(CheckpointKey("b")))


def test_a_hub_that_is_gone_is_not_asked_for_each_row(monkeypatch):
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    seen = []

    def look(key, is_online, place):
        seen.append(is_online)
        return Detail(error="the Hub cannot be reached", kind="network")

    catalog = ModelCatalog(look)
    assert catalog.is_online()
    catalog.refresh(CheckpointKey("a"))
    assert not catalog.is_online() and "cannot be reached" in catalog.hub_error


# ---- from click to model ----


class Loader(ScriptedRunner):
    """A runner whose loads can be held, refused or killed. loaded: what was asked for, in order."""

    def __init__(self):
        super().__init__(delay=0.001, prefill=0.0, steps=200)
        self.loaded, self.hub_error = [], None
        self.gate = threading.Event()
        self.gate.set()

    def load(self, request):
        self._stop.clear()
        self.loaded.append(request.checkpoint)
        yield LoadPhase("read")
        while request.checkpoint != "demo" and not self.gate.wait(0.01):
            if self._stop.is_set():
                raise ModelError("stopped")
        if self.hub_error is not None and request.checkpoint != "demo":
            raise self.hub_error
        yield LoadPhase("ready", replace(self.model, name=request.checkpoint))


@pytest.fixture
def session():
    made = Session(Loader())
    made.submit(LoadRequest())
    wait_for(lambda: made.state.status == "ready" and made.lifecycle.loaded)
    yield made
    made.runner.gate.set()
    made.close()


def picker_for(session, detail=None) -> ModelPicker:
    return ModelPicker(
        session, ModelCatalog(lambda key, *_: detail or Detail(report(is_here=True)))
    )


def test_a_choice_is_loaded_and_the_one_before_it_is_gone(session):
    picker = picker_for(session)
    picker.begin(NEW, CheckpointKey("someone/new-medusa")).join(30)
    assert picker.progress.stage == "done"
    assert session.state.model.name == "someone/new-medusa" and session.lifecycle.loaded == NEW


def test_a_problem_that_is_seen_leaves_the_model_alone(session):
    picker = picker_for(session, Detail(report(), error="the heads are for hidden size 64"))
    picker.begin(NEW, CheckpointKey("someone/new-medusa")).join(30)
    assert picker.progress.stage == "failed" and "hidden size 64" in picker.progress.error
    assert session.runner.loaded == ["demo"] and session.state.status == "ready"


@pytest.mark.parametrize(
    "trouble, said",
    [
        (ModelError("the heads are broken: download them again"), "the heads are broken"),
        (WorkerGone("the model's process ended (signal 9)"), "out of memory"),
        (ValueError("odd"), "unexpected ValueError: odd"),
    ],
)
def test_after_a_load_that_fails_the_model_before_it_is_back(session, trouble, said):
    session.runner.hub_error = trouble
    picker = picker_for(session)
    picker.begin(NEW, CheckpointKey("someone/new-medusa")).join(30)
    assert picker.progress.stage == "failed" and said in picker.progress.error
    wait_for(lambda: session.state.status == "ready")
    assert session.state.model.name == "demo" and session.lifecycle.loaded.checkpoint == "demo"
    assert session.runner.loaded == ["demo", "someone/new-medusa", "demo"]


def test_a_load_waits_for_the_answer_that_runs_and_can_be_given_up_there(session):
    from medusa_chat.decoding.settings import GenerationSettings

    session.runner.hold_at = 5
    job = session.submit(Reply("hi", GenerationSettings(max_new_tokens=400)))
    wait_for(lambda: len(job.trace) > 3)
    picker = picker_for(session)
    picker.begin(NEW, CheckpointKey("someone/new-medusa"))
    wait_for(lambda: picker.progress.stage == "loading")
    assert session.position(picker.progress.switch) == 1
    picker.cancel()
    assert picker.progress.stage == "stopped" and not job.done.is_set()
    session.runner.hold_at = None
    assert job.done.wait(240) and job.trace[-1].reason != "cancelled"
    assert session.runner.loaded == ["demo"]


def test_a_load_that_is_cancelled_ends_and_the_model_before_it_comes_back(session):
    session.runner.gate.clear()
    picker = picker_for(session)
    thread = picker.begin(NEW, CheckpointKey("someone/new-medusa"))
    wait_for(lambda: session.runner.loaded[-1] == "someone/new-medusa")
    picker.cancel()
    assert picker.progress.stage == "stopped"
    thread.join(30)
    wait_for(lambda: session.state.status == "ready")
    assert session.state.model.name == "demo" and picker.progress.stage == "stopped"


def test_a_second_load_is_refused_while_one_is_on(session):
    session.runner.gate.clear()
    picker = picker_for(session)
    picker.begin(NEW, CheckpointKey("someone/new-medusa"))
    with pytest.raises(UsageError, match="someone/new-medusa is being loaded"):
        picker.begin(LoadRequest("x/y"), CheckpointKey("x/y"))


def test_a_download_is_seen_cancelled_and_goes_on_while_the_model_answers(session, server):
    server.faults.append(Fault("cdn/.*safetensors", "slow", rate=100_000))
    needs = hub.plan("someone/new-medusa", None, None)
    picker = picker_for(session, Detail(report(), needs))
    thread = picker.begin(NEW, CheckpointKey("someone/new-medusa"))
    wait_for(lambda: picker.progress.download and picker.progress.download.done)
    assert picker.progress.stage == "downloading" and session.state.status == "ready"
    picker.cancel()
    assert picker.progress.stage == "stopped" and "kept" in picker.progress.error
    thread.join(30)
    assert session.runner.loaded == ["demo"]
    left = hub.plan("someone/new-medusa", None, None).left
    assert 0 < left < needs.left
    server.faults.clear()
    wait_for(lambda: not any(t.name == "download" for t in threading.enumerate()))
    again = picker_for(session, Detail(report(), hub.plan("someone/new-medusa", None, None)))
    again.begin(NEW, CheckpointKey("someone/new-medusa")).join(60)
    assert again.progress.stage == "done", again.progress.error


def test_a_connection_that_breaks_for_good_is_one_line_and_the_model_stays(session, server):
    needs = hub.plan("someone/new-medusa", None, None)
    server.faults.append(Fault("cdn/.*safetensors", "status", status=404))
    picker = picker_for(session, Detail(report(), needs))
    picker.begin(NEW, CheckpointKey("someone/new-medusa")).join(60)
    assert picker.progress.stage == "failed" and "\n" not in picker.progress.error
    assert session.runner.loaded == ["demo"] and session.state.status == "ready"


# ---- the events ----


@pytest.fixture
def controller(session):
    return ModelsController(session, ModelCatalog(lambda key, *_: Detail(report(is_here=True))))


def event(**data):
    return SimpleNamespace(_data=data)


def test_a_guest_sees_no_rows_and_can_neither_load_nor_cancel_nor_delete(controller, session):
    hits = [
        controller.refresh(ModelsTab(), VISITOR, *BOXES),
        controller.load_model(ModelsTab(), event(id="someone/new-medusa"), VISITOR, *BOXES),
        controller.halt(ModelsTab(), VISITOR, *BOXES),
        controller.drop_model(ModelsTab(), event(id="someone/new-medusa"), VISITOR, *BOXES),
    ]
    for _, rows in hits:
        assert json.loads(rows)["rows"] == [] and json.loads(rows)["guest"]
    assert controller.picker.progress == LoadProgress() and session.runner.loaded == ["demo"]
    by_header = SimpleNamespace(headers={"x-medusa-guest": "1"}, username="someone")
    assert json.loads(controller.refresh(ModelsTab(), by_header, *BOXES)[1])["guest"]


def test_a_tab_is_sent_only_what_it_does_not_show(controller):
    seen = ModelsTab()
    card, rows = controller.refresh(seen, OWNER, *BOXES)
    assert json.loads(card)["loaded"]["name"] == "demo" and json.loads(rows)["rows"]
    wait_for(
        lambda: (
            controller.view.session.lifecycle.memory
            and controller.catalog._workers == 0
            and not controller.catalog._is_listing
        )
    )
    controller.refresh(seen, OWNER, *BOXES)
    again = controller.refresh(seen, OWNER, *BOXES)
    assert all(isinstance(part, dict) for part in again)  # gr.skip()


def test_a_click_loads_the_row_with_what_the_boxes_say(controller, session):
    boxes = ("", "", "nf4", "2048")
    card, _ = controller.load_model(ModelsTab(), event(id="someone/new-medusa"), OWNER, *boxes)
    assert json.loads(card)["stage"] != "idle"
    wait_for(lambda: controller.picker.progress.stage == "done")
    assert session.lifecycle.loaded == LoadRequest("someone/new-medusa", None, "nf4", "auto", 2048)


def test_only_the_tab_that_asked_is_told_that_a_load_failed(session):
    bad = Detail(report(), error="the heads are for hidden size 64")
    controller = ModelsController(session, ModelCatalog(lambda *_: bad))
    mine, other = ModelsTab(), ModelsTab()
    controller.load_model(mine, event(id="someone/new-medusa"), OWNER, *BOXES)
    wait_for(lambda: controller.picker.progress.stage == "failed")
    controller.refresh(mine, OWNER, *BOXES)
    controller.refresh(other, OWNER, *BOXES)
    assert json.loads(mine.shown[0])["stage"] == "failed" and "hidden size" in mine.shown[0]
    assert json.loads(other.shown[0])["stage"] == "idle" and "hidden size" not in other.shown[0]


def test_a_preset_is_loaded_with_the_base_it_was_trained_for(controller, session):
    preset = model_preset("leptonai/TinyLlama-1.1B-Chat-v1.0-4heads")
    controller.load_model(ModelsTab(), event(id=preset.id), OWNER, *BOXES)
    wait_for(lambda: controller.picker.progress.stage == "done")
    assert session.lifecycle.loaded.backbone == preset.base


@pytest.mark.parametrize(
    "posted", [{}, {"id": None}, {"id": ["a"]}, {"id": "../../etc"}, {"id": ""}]
)
def test_what_was_posted_past_the_page_harms_nothing(controller, session, posted, told):
    controller.drop_model(ModelsTab(), event(**posted), OWNER, *BOXES)
    assert told and all("\n" not in line for _, line, _ in told)
    controller.load_model(ModelsTab(), event(**posted), OWNER, {}, [], 7, None)
    assert session.runner.loaded == ["demo"]


def test_the_model_in_use_cannot_be_deleted(controller, server, told):
    controller.load_model(ModelsTab(), event(id="someone/new-medusa"), OWNER, *BOXES)
    wait_for(lambda: controller.picker.progress.stage == "done")
    controller.drop_model(ModelsTab(), event(id="someone/new-medusa"), OWNER, *BOXES)
    in_use = "someone/new-medusa is in use: load another model first"
    assert [one[:2] for one in told] == [("warning", in_use)]


def test_a_cached_one_is_deleted_and_its_bytes_are_told(controller, server, told):
    list(hub.pull(hub.plan("someone/new-medusa", None, None)))
    controller.drop_model(ModelsTab(), event(id="someone/new-medusa"), OWNER, *BOXES)
    assert "deleted" in told[0][1] and "kB" in told[0][1]
    assert hub.cached() == ()


def test_a_deleted_one_leaves_the_recent_models(session, server, tmp_path):
    recent = RecentModels(tmp_path)
    for name in ("someone/new-medusa", "someone/other"):
        recent.note(LoadRequest(name), ScriptedRunner().model)
    list(hub.pull(hub.plan("someone/new-medusa", None, None)))
    controller = ModelsController(session, recent=recent)
    controller.drop_model(ModelsTab(), event(id="someone/new-medusa"), OWNER, *BOXES)
    assert hub.cached() == ()
    assert [one.request.checkpoint for one in recent.all()] == ["someone/other"]


def test_memory_is_asked_of_the_models_process_in_its_turn(session):
    session.measure_memory()
    assert wait_for(lambda: session.lifecycle.memory) == DeviceMemory("cpu", 8 * GB, 16 * GB)


def test_the_state_after_a_failed_first_load_still_takes_another():
    session = Session(Loader())
    session.runner.hub_error = ModelError("no")
    session.submit(LoadRequest("x/broken"))
    wait_for(lambda: session.state.status == "failed")
    session.runner.hub_error = None
    switch = session.submit(Switch(LoadRequest()))
    assert switch.done.wait(240) and not switch.error
    assert session.state == ModelState("ready", model=switch.result.model)
    session.close()
