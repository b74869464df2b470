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


def learnt_view(**more) -> dict:
    runner = runner_of(**more)
    return tune_view(ModelState("ready", model=runner.model, learnt=runner.learnt))


def test_speedups_are_tokens_over_cost_and_the_best_is_marked():
    view = learnt_view()
    points, used = dict(view["speedup"]["points"]), dict(view["tokens"]["used"])
    assert points[1] == 1
    assert points[16] == pytest.approx(used[16] / (1 + 0.02 * 15), rel=2e-3)
    nodes, best = view["speedup"]["best"]
    assert points[nodes] == best == max(points.values())
    assert view["costs"]["ms"] == 10 and dict(view["costs"]["points"])[24] == pytest.approx(1.46)


def test_where_plain_decoding_is_faster_one_node_is_best():
    assert learnt_view(node_cost=2.0)["speedup"]["best"] == [1, 1.0]


def test_before_an_answer_nothing_is_known_of_costs():
    view = view_of(runner_of())
    assert view["costs"] is None and view["speedup"] is None


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


def test_what_an_answer_has_taught_is_shown(controller):
    assert controller.view()["costs"]["steps"] == 40
    controller.session.submit(LoadRequest()).done.wait(240)
    assert controller.view()["costs"] is None, "another model has learnt nothing yet"


def test_a_look_sends_only_what_has_changed(controller):
    seen = ["", ""]
    assert json.loads(controller.refresh(seen, OWNER)[0])["model"] == "scripted"
    assert controller.refresh(seen, OWNER) == ({"__type__": "update"},) * 2


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
