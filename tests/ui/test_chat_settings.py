"""The chat's settings: refused in a line, off with a reason, recalled value by value."""

import json
from dataclasses import replace

import gradio as gr
import pytest
from support.conversations import TREES, ended, owner, post
from support.scripted import ScriptedRunner

from medusa_chat.decoding.drafters import kinds
from medusa_chat.ui.chat.settings_panel import DEFAULTS, build_settings, idle
from medusa_chat.ui.page.inputs import SettingsForm


def test_a_bad_setting_is_one_line_and_queues_nothing(controller):
    tab = owner()
    view = post(controller.send, controller.refuse, tab, "hi", temperature=3)
    assert "Temperature" in view.live and controller.session.runner.prompts == []
    assert controller.session_of(tab).transcript.messages == ()


@pytest.mark.parametrize(
    ("chosen", "off"),
    [
        ({}, {"posterior_threshold", "locked", "posterior_alpha"}),
        (
            {"temperature": 0},
            {"acceptance", "top_p", "top_k", "min_p", "seed", "locked"}
            | {"posterior_threshold", "posterior_alpha"},
        ),
        ({"acceptance": "typical"}, {"top_p", "top_k", "min_p", "seed", "posterior_alpha"}),
        ({"acceptance": "typical", "locked": False}, {"top_p", "top_k", "min_p", "seed"}),
        ({"acceptance": "typical-sampled", "locked": False}, {"top_p", "top_k", "min_p"}),
        (
            {"vanilla": True},
            {"drafter", "tree", "nodes", "posterior_threshold", "locked", "posterior_alpha"},
        ),
        (
            {"drafter": "prompt-lookup"},
            {"tree", "posterior_threshold", "locked", "posterior_alpha"},
        ),
    ],
)
def test_what_does_nothing_is_off_and_says_why(chosen, off):
    why = idle({**DEFAULTS, "vanilla": False, **chosen})
    assert set(why) == off and all(why.values())


def test_a_text_field_that_is_emptied_or_pasted_into_is_remembered_when_it_is_left():
    with gr.Blocks() as page:
        panel = build_settings(TREES, gr.Checkbox(), gr.Textbox(), gr.State())
    told = {(component, event) for fn in page.fns.values() for component, event in fn.targets}
    for name in ("seed", "stop"):
        assert {"input", "blur"} <= {e for id, e in told if id == panel.components[name]._id}
    assert not [e for id, e in told if id == panel.components["system"]._id]


def test_an_emptied_seed_is_a_new_one_for_every_answer(controller):
    tab = owner()
    post(controller.send, controller.refuse, tab, "hi", seed="")
    ended(controller.session_of(tab))
    assert controller.session.runner.settings[-1].seed is None


def test_what_a_browser_remembers_is_checked_value_by_value():
    kept = {"temperature": 9, "top_p": 0.5, "tree": "../x", "seed": "5", "vanilla": True, "x": 1}
    form = SettingsForm({}, TREES, DEFAULTS)
    assert form.restored(kept) == {**DEFAULTS, "top_p": 0.5, "seed": "5"}
    for nothing in (None, "x", [1], 3):
        assert form.restored(nothing) == DEFAULTS


def panel_of(name, **sampling):
    """The settings of a page whose model has this name and these defaults."""
    model = replace(ScriptedRunner(sampling=sampling).model, name=name) if name else None
    with gr.Blocks():
        return build_settings(TREES, gr.Checkbox(), gr.Textbox(), gr.State(), model=lambda: model)


def test_a_models_first_chat_begins_with_its_own_sampling():
    kept = {**DEFAULTS, "temperature": 0.2, "seed": "5", "model": "other"}
    first = panel_of("one", temperature=0.6, top_k=20).first(json.dumps(kept))
    assert (first["temperature"], first["top_k"], first["top_p"]) == (0.6, 20, 1)
    assert first["seed"] == "5" and first["model"] == "one"
    assert panel_of("two").first(first)["temperature"] == DEFAULTS["temperature"]


def test_what_was_chosen_for_a_model_stays_in_its_next_chats():
    kept = {**DEFAULTS, "temperature": 0.2, "model": "one"}
    assert panel_of("one", temperature=0.6).first(kept)["temperature"] == 0.2
    before = {**DEFAULTS, "temperature": 0.2}  # of an earlier version, without a model's name
    assert panel_of("one").first(before)["temperature"] == 0.2
    assert panel_of("").first(kept) == {**kept, "preset": ""}  # the model is still being loaded


def test_the_models_defaults_are_named():
    assert panel_of("one", temperature=0.6, top_p=0.9).words.endswith("temperature 0.6, top-p 0.9")
    assert "none named" in panel_of("one").words and panel_of("").words == ""


def test_penalties_are_settings_of_the_page_as_of_the_command_line(controller):
    tab = owner()
    post(controller.send, controller.refuse, tab, "hi", repetition_penalty=1.2, presence_penalty=-1)
    ended(controller.session_of(tab))
    used = controller.session.runner.settings[-1]
    assert (used.repetition_penalty, used.presence_penalty, used.frequency_penalty) == (1.2, -1, 0)
    view = post(controller.send, controller.refuse, tab, "hi", frequency_penalty=3)
    assert "Frequency penalty is 3" in view.live


@pytest.mark.parametrize(
    ("heads", "beside", "label"),
    [
        (5, "", "Medusa"),
        (0, "", "Lookup"),
        (0, "eagle", "EAGLE"),
        (0, "draft", "Draft"),
    ],
)
def test_the_switch_names_what_drafts(heads, beside, label):
    assert kinds.short_label(heads, beside) == label


def test_a_new_chat_takes_the_settings_of_the_last_one_but_not_its_stop_strings():
    kept = {**DEFAULTS, "temperature": 0.2, "stop": "END", "model": "one", "preset": ""}
    panel = panel_of("one")
    assert panel.anew(kept) == {**kept, "stop": ""}
    assert panel.anew(json.dumps(kept)) == {**kept, "stop": ""}  # as the browser kept them
    assert panel.first(kept)["stop"] == "END"  # the same conversation, loaded again
