"""Presets on the page: picked, saved, deleted, given and taken as files."""

import json
from dataclasses import asdict

import gradio as gr
import pytest
from support.conversations import TREES, ended, event, guest, owner, quick_session, turn

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.runtime.history import FILE, History
from medusa_chat.runtime.presets import Preset, load_preset, own_names, save_preset, shipped_names
from medusa_chat.ui.access.share import Share
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.presets import chosen, offered, settings_of
from medusa_chat.ui.chat.settings_panel import DEFAULTS
from medusa_chat.ui.page.inputs import checked
from medusa_chat.ui.tabs import build_app


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_CHAT_DATA_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def session():
    with quick_session() as made:
        yield made


class OnPage:
    """The events of a page's presets, as a browser posts them."""

    def __init__(self, session, data):
        history = History(data / FILE)
        blocks, self.controller = build_app(session, TREES, Share(lambda: 0), history)
        self.calls = {one.fn.__qualname__: one for one in blocks.fns.values() if one.fn}
        self.blocks, self.tab, self.shown = blocks, owner(), {}

    def call(self, block, name, request=None, tab=None, **values):
        """An event of the block with this id, with what stands on the page; what changes there."""
        (fn,) = [
            one
            for one in self.blocks.fns.values()
            for target, trigger in one.targets
            if trigger == name and self.id_of(target) == block
        ]
        posted = {}
        for component in fn.inputs:
            id = component.elem_id or ""
            is_tab = isinstance(component, gr.State) and isinstance(component.value, Tab)
            now = self.shown.get(component._id, getattr(component, "value", None))
            posted[component] = (tab or self.tab) if is_tab else values.get(id, now)
        data = event(**values.get("event", {}))
        results = fn.fn(posted, data, request or NOBODY)
        for component, made in zip(fn.outputs, results, strict=True):
            value = made.get("value", None) if isinstance(made, dict) else made
            if not isinstance(made, dict) or "value" in made:
                self.shown[component._id] = value
        return dict(zip([one.elem_id for one in fn.outputs], results, strict=True))

    def id_of(self, target):
        return getattr(self.blocks.blocks[target], "elem_id", "") if target is not None else ""

    @property
    def chat(self):
        return self.controller.session_of(self.tab)


NOBODY = type("Request", (), {"headers": {}, "username": None})()


@pytest.fixture
def page(session, data):
    return OnPage(session, data)


def test_a_preset_sets_the_settings_and_the_system_prompt_of_the_conversation(page):
    made = page.call("preset", "input", preset="code")
    kept, shipped = page.chat.settings, load_preset("code")
    assert kept["preset"] == "code" and kept["temperature"] == shipped.settings["temperature"]
    assert page.chat.system == shipped.system and made["system"]["value"] == shipped.system
    assert made["preset"]["value"] == "code"
    assert json.loads(made["presets"])["name"] == "code"
    assert json.loads(made["conversations"])["preset"] == "code"


def test_none_keeps_the_settings(page):
    page.call("preset", "input", preset="code")
    before = page.chat.settings
    page.call("preset", "input", preset="")
    assert page.chat.settings == {**before, "preset": ""}


def test_settings_are_saved_under_a_name_and_come_back(page):
    page.call("preset", "input", preset="creative")
    page.call("preset-save", "click", **{"preset-name": "  my   own ", "system": "Be odd."})
    own = load_preset("my own")
    assert own_names() == ("my own",) and own.system == "Be odd."
    assert page.chat.settings["preset"] == "my own"
    assert own.settings["temperature"] == load_preset("creative").settings["temperature"]
    page.call("presets", "drop_preset", preset="my own")
    assert own_names() == () and page.chat.settings["preset"] == ""


@pytest.mark.parametrize("name", ["", "../x", "a@b", "x" * 80, None, 7])
def test_a_bad_name_saves_nothing_and_says_so(page, data, name):
    with pytest.warns(UserWarning, match="name"):
        page.call("preset-save", "click", **{"preset-name": name})
    assert own_names() == () and not list(data.rglob("*.toml"))


def test_a_file_is_given_and_taken_again(page):
    page.call("preset", "input", preset="brief")
    line = json.loads(page.call("presets", "give_preset", preset="brief")["presets"])
    assert line["name"] == "brief" and Preset.read("x", line["text"]) is not None
    page.call("presets", "take_preset", event={"name": "ours", "text": line["text"]})
    assert load_preset("ours").settings == load_preset("brief").settings
    assert page.chat.settings["preset"] == "ours"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("temperature = 9", "temperature is 9"),
        ("nonsense", "not TOML"),
        ("colour = 1", "unknown setting"),
        ('tree = "/etc/passwd"', "tree is"),
        ('stop = ["a\\nb"]', "line break"),
        ("x = 1" * 99_999, "larger than"),
        (7, "choose a preset's TOML file"),
    ],
)
def test_a_file_with_a_fault_is_refused_and_changes_nothing(page, text, why):
    before = page.chat.settings
    with pytest.warns(UserWarning, match=why):
        page.call("presets", "take_preset", event={"name": "ours", "text": text})
    assert own_names() == () and page.chat.settings == before


def test_a_shipped_preset_is_not_deleted(page):
    with pytest.warns(UserWarning, match="ships with medusa-chat"):
        page.call("presets", "drop_preset", preset="code")
    assert "code" in shipped_names()


def test_guests_pick_what_ships_and_change_nothing(page, data):
    save_preset(Preset("mine", {"temperature": 1.5}, "secret"))
    save_preset(Preset("code", {"temperature": 1.5}, "secret"))
    visitor = Tab()
    page.controller.attach(visitor, None, guest())
    assert "mine" in offered(False) and "mine" not in offered(True)
    for act in (
        lambda: page.call("preset", "input", guest(), visitor, preset="mine"),
        lambda: page.call("preset-save", "click", guest(), visitor, **{"preset-name": "theirs"}),
        lambda: page.call("presets", "drop_preset", guest(), visitor, preset="mine"),
        lambda: page.call(
            "presets", "take_preset", guest(), visitor, event={"name": "a", "text": ""}
        ),
    ):
        with pytest.warns(UserWarning):
            act()
    assert set(own_names()) == {"mine", "code"} and load_preset("mine").system == "secret"
    made = page.call("preset", "input", guest(), visitor, preset="code")
    assert "secret" not in repr(made)
    assert page.controller.session_of(visitor).system == chosen("code", True).system != "secret"


def test_what_is_saved_over_another_says_so(page, told):
    for _ in range(2):
        page.call("preset-save", "click", **{"preset-name": "mine"})
    assert [text for _, text, _ in told] == [
        "The preset mine is saved.",
        "The preset mine is replaced.",
    ]


def test_a_new_chat_goes_on_with_the_preset(page):
    page.call("preset", "input", preset="code")
    page.controller.send(page.tab, turn("hello", system=page.chat.system))
    first = page.chat
    ended(first)
    (new,) = [
        one
        for one in page.blocks.fns.values()
        for target, trigger in one.targets
        if trigger == "click" and page.id_of(target) == "clear"
    ]
    posted = {one: page.shown.get(one._id, getattr(one, "value", None)) for one in new.inputs}
    state = next(o for o in new.inputs if isinstance(getattr(o, "value", None), Tab))
    new.fn({**posted, state: page.tab}, NOBODY)
    assert page.chat is not first and page.chat.settings["preset"] == "code"
    assert page.chat.system == load_preset("code").system


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"drafter": "none"}, {"drafter": "auto", "vanilla": True}),
        ({"drafter": "prompt-lookup"}, {"drafter": "prompt-lookup", "vanilla": False}),
        ({"seed": 7}, {"seed": "7"}),
        ({"stop": ["a", " b"]}, {"stop": "a\n b"}),
        ({"posterior_threshold": 0.16, "posterior_alpha": 0.4}, {"locked": True}),
        ({"posterior_alpha": 0.7}, {"locked": False, "posterior_alpha": 0.7}),
        ({"nodes": 12, "tree": "chain"}, {"nodes": 12, "tree": "chain"}),
    ],
)
def test_a_preset_becomes_what_the_page_posts_for_it(told, shown):
    if told.get("tree"):
        preset = Preset("x", {"nodes": 12, "tree": "chain-5"})
        values = settings_of(preset, DEFAULTS, ("chain-5",))
        assert values["tree"] == "chain-5" and values["nodes"] == 12
        return
    values = settings_of(Preset("x", told), DEFAULTS, TREES)
    assert {name: values.get(name) for name in shown} == shown
    back = asdict(checked(values, TREES).settings)
    wanted = asdict(GenerationSettings.from_json(dict(told)))
    assert {name: back[name] for name in told} == {name: wanted[name] for name in told}


def test_what_is_no_preset_is_refused():
    for name in ("nobody", 7, None, "../code"):
        with pytest.raises(UsageError):
            chosen(name, False)
