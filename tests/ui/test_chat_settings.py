"""The chat's settings: refused in a line, off with a reason, recalled value by value."""

import gradio as gr
import pytest
from support.conversations import TREES, ended, owner, post

from medusa_chat.ui.chat.setting_components import DEFAULTS, idle
from medusa_chat.ui.chat.settings_panel import build_settings
from medusa_chat.ui.page.settings_form import SettingsForm


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
