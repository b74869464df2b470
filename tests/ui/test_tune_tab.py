"""The Tune tab without a browser: its events, and what it shows as data."""

import json
import math
from types import SimpleNamespace

import pytest
from support.scripted import ScriptedRunner

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.session import Session
from medusa_chat.training.hardware import GPUS, SHAPES
from medusa_chat.ui.access.guard import GUEST, GUEST_HEADER
from medusa_chat.ui.tune.roofline import roof_view, setting_of
from medusa_chat.ui.tune.tab import FIRST, TuneController
from medusa_chat.ui.tune.view import tune_view

OWNER = SimpleNamespace(headers={}, username=None)
VISITOR = SimpleNamespace(headers={GUEST_HEADER: "1"}, username=GUEST)


def runner_of(**more) -> ScriptedRunner:
    return ScriptedRunner(delay=0, prefill=0, steps=40, **more)


def view_of(runner: ScriptedRunner) -> dict:
    return tune_view(ModelState("ready", model=runner.model))


# ---- what is shown ----


@pytest.mark.parametrize("status", ["empty", "loading", "failed"])
def test_without_a_model_it_says_what_to_do(status):
    view = tune_view(ModelState(status))
    assert view["text"] and "table" not in view


def test_a_model_without_heads_is_told_how_to_get_them():
    from dataclasses import replace

    model = replace(runner_of().model, tree_facts=None, heads=0)
    view = tune_view(ModelState("ready", model=model))
    assert "no Medusa heads" in view["text"] and "medusa-chat train" in view["text"]


def test_accuracies_have_a_row_per_head_and_say_where_they_are_from():
    table = view_of(runner_of())["table"]
    assert len(table["rows"]) == 4 and {len(row) for row in table["rows"]} == {10}
    assert table["rows"][0][0] == 0.62
    assert table["note"].startswith("12 answers to secret-file.jsonl, 3,456 positions")


def test_the_tree_in_use_is_cut_and_its_paths_are_worth_products():
    tree = view_of(runner_of(nodes=12))["tree"]
    assert (tree["nodes"], tree["whole"], len(tree["parent"])) == (12, 24, 12)
    assert tree["parent"][0] == -1 and tree["rank"][:2] == [None, 1] and tree["worth"][0] == 1
    for node in range(1, 12):
        assert tree["worth"][node] < tree["worth"][tree["parent"][node]]
    child = tree["parent"].index(1)
    assert tree["worth"][child] == pytest.approx(0.62 * 0.62 * 0.85, rel=1e-3)


def test_curves_rise_and_the_searched_tree_is_never_below_the_one_in_use():
    tokens = view_of(runner_of())["tokens"]
    searched, used = dict(tokens["searched"]), dict(tokens["used"])
    assert list(searched.values()) == sorted(searched.values())
    assert all(searched[nodes] >= value - 1e-3 for nodes, value in used.items())
    assert tokens["calibration"] == [[1, 1.0], [8, 2.1], [16, 2.4]]


def test_speedups_are_tokens_over_cost_and_the_best_is_marked():
    view = view_of(runner_of(is_timed=True))
    (line,) = view["speedup"]["lines"]
    points, used = dict(line["points"]), dict(view["tokens"]["used"])
    assert points[1] == 1
    assert points[16] == pytest.approx(used[16] / (1 + 0.02 * 15), rel=2e-3)
    best = line["best"]
    assert points[best["nodes"]] == pytest.approx(best["speedup"], abs=0.01)
    assert view["times"]["lines"][0]["ms"][0] == 10 and view["speedup"]["plain"] == ""


def test_where_plain_decoding_is_faster_it_says_so():
    view = view_of(runner_of(is_timed=True, node_cost=2.0))
    assert view["speedup"]["plain"].startswith("Plain decoding is faster than Medusa here")
    assert view["speedup"]["lines"][0]["best"]["nodes"] == 1


def test_before_anything_was_timed_there_is_no_speedup():
    view = view_of(runner_of())
    assert view["times"] is None and view["speedup"] is None


def test_a_guest_sees_no_file_names_and_is_known_as_one():
    from dataclasses import replace

    model = replace(runner_of().model, name="/home/me/secret/model")
    view = tune_view(ModelState("ready", model=model), is_guest=True)
    assert view["guest"] and "secret" not in json.dumps(view)


# ---- events ----


@pytest.fixture
def controller():
    session = Session(runner_of())
    session.submit(LoadRequest())
    assert session.submit(Reply("x", GenerationSettings(max_new_tokens=2))).done.wait(240)
    yield TuneController(session)
    session.close()


def ended(controller: TuneController) -> dict:
    assert controller._asked is not None and controller._asked.done.wait(240)
    return controller.view()


def test_measuring_waits_its_turn_and_then_shows_what_was_found(controller, monkeypatch):
    monkeypatch.setattr(controller.session.runner, "hold_at", 0)
    job = controller.session.submit(Reply("slow", GenerationSettings()))
    seen = ["", ""]
    line = json.loads(controller.measure(seen, OWNER)[0])
    assert line["work"]["running"] and "waiting, 1 ahead" in line["work"]["text"]
    first = controller._asked
    controller.measure(seen, OWNER)
    assert controller._asked is first, "a second click asks for the same"
    controller.session.cancel(job)
    view = ended(controller)
    assert view["work"]["text"] == "Measured: 24 nodes are used."
    assert view["speedup"]["lines"][0]["best"]["speedup"] > 1


def test_a_look_sends_only_what_has_changed(controller):
    seen = ["", ""]
    assert json.loads(controller.refresh(seen, OWNER)[0])["model"] == "scripted"
    assert controller.refresh(seen, OWNER) == ({"__type__": "update"},) * 2


def test_a_guest_changes_nothing(controller):
    assert json.loads(controller.measure(["", ""], VISITOR)[0])["guest"]
    assert controller._asked is None and not controller.session.runner.is_timed


def test_a_measurement_that_fails_says_why(controller, monkeypatch):
    def broken(request):
        raise UsageError("the steps cannot be timed")
        yield

    monkeypatch.setattr(controller.session.runner, "run", broken)
    controller.measure(["", ""], OWNER)
    work = ended(controller)["work"]
    assert work["failed"] and "the steps cannot be timed" in work["text"]
    assert controller.session.state.status == "ready"


# ---- the hardware model ----


@pytest.mark.parametrize("gpu", [g.name for g in GPUS])
@pytest.mark.parametrize("shape", [s.name for s in SHAPES])
def test_every_gpu_has_a_finite_picture(gpu, shape):
    view = roof_view(setting_of(gpu, shape, "2048", "4", "64"))
    numbers = [v for _, v in view["overhead"] + view["speedup"]]
    assert all(math.isfinite(v) and v > 0 for v in numbers) and len(view["points"]) == 6
    assert view["overhead"][0] == [1, 1.0] and view["speedup"][0] == [1, 1.0]
    assert view["best"]["speedup"] >= max(v for _, v in view["speedup"]) * 0.999
    assert all(p["tflops"] <= view["peak"] * 1.001 for p in view["points"])
    assert gpu in view["text"] and len(view["assumptions"]) == 4


@pytest.mark.parametrize(
    "posted",
    [
        ("TPU", "7B", "1024", "1", "64"),
        ("A40", "8B", "1024", "1", "64"),
        ("A40", "7B", "1025", "1", "64"),
        ("A40", "7B", "1024", "0", "64"),
        ("A40", "7B", "1024", "1", "-1"),
        (["A40"], None, {}, 1.5, True),
    ],
)
def test_what_cannot_be_chosen_is_refused(posted, controller):
    with pytest.raises(UsageError, match="choose one of"):
        setting_of(*posted)
    assert controller.model(*posted, "paper") == {"__type__": "update"}


def test_the_loaded_models_heads_may_stand_for_the_papers(controller):
    paper = json.loads(controller.model(*FIRST))
    own = json.loads(controller.model(*FIRST[:-1], "loaded"))
    assert paper["overhead"] == own["overhead"] and paper["speedup"] != own["speedup"]
    assert "loaded model" in own["assumptions"][2]
