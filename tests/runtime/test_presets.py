"""Presets: what a file may hold, what is refused in a line, and what of the user's is kept."""

import pytest

from medusa_chat import paths
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.runtime.presets import (
    Preset,
    delete_preset,
    find_preset,
    load_preset,
    own_names,
    preset_names,
    save_preset,
)


@pytest.fixture(autouse=True)
def data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv(paths.DATA_DIR_VARIABLE, str(tmp_path))
    return tmp_path / "data" / "presets"


def test_every_preset_that_ships_is_valid_and_says_what_it_is_for():
    assert len(preset_names()) >= 4 and own_names() == ()
    assert all(load_preset(name).description for name in preset_names())


@pytest.mark.parametrize(
    "system", ["", "One line", 'Two\nlines """ of \\ quotes"', "\x7f\t\r\n\nend\n", "\U0001f40d é"]
)
def test_a_preset_is_read_as_it_was_written(system):
    settings = {
        "temperature": 0.35,
        "stop": ["\n", 'a"b'],
        "tree": "chain-3",
        "nodes": 3,
        "seed": 5,
    }
    made = Preset("my own", settings, system, "what for")
    assert Preset.read("my own", made.to_toml()) == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temprature = 1", "unknown setting 'temprature'"),
        ("temperature = 3", "temperature is 3: give a number from 0 to 2"),
        ('top_k = "many"', "top_k is 'many'"),
        ("top_k = 1.5", "top_k is 1.5"),
        ("system = 5", "system is 5: give a text"),
        ("stop = [1]", "stop is"),
        ('tree = "/etc/passwd"', "tree is '/etc/passwd'"),
        ('drafter = ["none"]', "drafter is"),
        ("[settings]\ntemperature = 1", "unknown setting 'settings'"),
        ("temperature: 1", "is not TOML"),
        ("temperature = 1979-05-27", "temperature is"),
        (f'system = "{"x" * 300_000}"', "larger than 200 kB"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_in_a_line(text, said):
    with pytest.raises(UsageError) as refused:
        Preset.read("mine", text)
    assert said in str(refused.value) and str(refused.value).startswith("preset mine")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a@b", "x" * 61, "end.", "a\nb"])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(UsageError, match="the preset's name"):
        Preset(name)


def test_the_users_own_preset_comes_before_one_that_ships_and_can_be_deleted(data_dir):
    save_preset(Preset("precise", {"temperature": 0.1}))
    save_preset(Preset("mein Eigenes 2", {}, "Sei kurz."))
    assert load_preset("precise").settings == {"temperature": 0.1}
    assert own_names() == ("mein Eigenes 2", "precise") and "code" in preset_names()
    assert find_preset(str(data_dir / "precise.toml")) == load_preset("precise")
    delete_preset("precise")
    assert load_preset("precise").settings == {"temperature": 0}
    with pytest.raises(UsageError, match="ships with medusa-chat"):
        delete_preset("precise")
    assert [file.name for file in data_dir.iterdir()] == ["mein Eigenes 2.toml"]


def test_a_preset_of_settings_gives_these_whatever_a_model_names():
    settings = GenerationSettings(temperature=0.0, max_new_tokens=64, stop=("a",))
    preset = Preset.of("mine", settings, "Be short.")
    own = {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    assert GenerationSettings.from_json({**own, **preset.settings}) == settings


def test_what_is_not_there_is_said_with_what_there_is(tmp_path):
    with pytest.raises(UsageError, match="no preset 'x': choose one of .*precise"):
        find_preset("x")
    with pytest.raises(UsageError, match="cannot be read"):
        find_preset(str(tmp_path / "x.toml"))
