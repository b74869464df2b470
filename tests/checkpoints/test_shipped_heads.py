"""Heads that come with medusa-chat: for which backbones, and what is said where they do not fit."""

import json

import pytest
from support.gguf_models import tiny_model, write_gguf
from support.shipped import BASE, NAME

from medusa_chat import gguf_files
from medusa_chat.checkpoints import shipped_heads
from medusa_chat.checkpoints.inspection import inspect
from medusa_chat.checkpoints.layouts.contents import survey
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.places import shipped_folder
from medusa_chat.checkpoints.shipped_heads import is_of
from medusa_chat.cli.main import main
from medusa_chat.errors import ModelError
from medusa_chat.hub.catalog import model_preset, model_presets, shape
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.calibration import CALIBRATION_FILE, Calibration


@pytest.fixture
def backbone(shipping, tmp_path):
    """A GGUF file that is called as the base."""
    return write_gguf(tmp_path / "gguf" / "Tiny-1M-Instruct.Q8_0.gguf", tiny_model())


def loaded(checkpoint, backbone=None):
    request = LoadRequest(str(checkpoint), backbone and str(backbone), precision="fp32")
    return list(load(request))[-1][1]


@pytest.mark.parametrize(
    "name, fits",
    [
        (BASE, True),
        ("tiny-1m-instruct", True),
        ("them/Tiny-1M-Instruct-GGUF", True),
        ("/models/Tiny-1M-Instruct", True),
        ("C:\\models\\Tiny-1M-Instruct.Q4_K_M.gguf", True),
        ("Tiny-1M-Instruct-IQ4_XS.gguf", True),
        ("Tiny-1M-Instruct-bf16.gguf", True),
        ("Tiny-1M-Instruct-UD-Q4_K_XL.gguf", True),
        ("Tiny-1M-Instruct-Q4_K_M-00001-of-00002.gguf", True),
        ("them/Tiny-1M", False),
        ("Tiny-1M-Instruct-of-mine.gguf", False),
        ("them/My-Tiny-1M-Instruct", False),
        ("them/Tiny-1M-Instruct/other.gguf", False),
    ],
)
def test_a_backbone_is_known_by_its_name_however_its_weights_are_stored(shipping, name, fits):
    assert is_of(model_preset(NAME), name) == fits


@pytest.mark.parametrize(
    "name, fits",
    [
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct", True),
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", True),
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q8_0.gguf", True),
        ("qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf", True),
        ("Qwen/Qwen2.5-Coder-0.5B", False),
        ("Qwen/Qwen2.5-0.5B-Instruct", False),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", False),
    ],
)
def test_a_base_that_is_a_gguf_file_on_the_hub_is_known_by_its_model(name, fits):
    assert is_of(model_preset("qwen-coder-0.5b"), name) == fits
    larger = name.replace("0.5", "1.5")
    assert is_of(model_preset("qwen-coder"), larger) == (fits or larger == name)


@pytest.mark.parametrize("preset", [p for p in model_presets() if p.ships], ids=lambda p: p.id)
def test_heads_that_ship_fit_the_backbone_that_their_preset_names(preset):
    folder = shipped_folder(preset.id)
    config = shape(preset.shape)
    heads = survey(LocalFolder(folder)).heads
    assert heads.heads == preset.heads and heads.layers in (1, 2) and heads.root
    assert heads.hidden == config["hidden_size"] and heads.lm == "shared"
    assert (
        json.loads((folder / "config.json").read_text())["base_model_name_or_path"] == preset.base
    )
    found = Calibration.read(folder / CALIBRATION_FILE)
    assert len(found.accuracies) == preset.heads and len(found.tree) == 64
    listed = found.shortlist
    assert list(listed) == sorted(set(listed)) and 0 <= listed[0]
    assert 1_000 < len(listed) < config["vocab_size"] // 2 and listed[-1] < config["vocab_size"]
    most = 45_000_000 if preset.id == "qwen-coder" else 25_000_000
    assert sum(file.stat().st_size for file in folder.iterdir()) < most
    assert (folder / "recipe.toml").is_file()
    assert found_heads(preset.base.rpartition("/")[2], config) == preset.id


def found_heads(name, config):
    heads = shipped_heads.shipped_heads(name, config)
    return heads and heads.name


def test_a_backbone_that_is_named_alone_takes_the_heads_and_says_so(backbone, shipping):
    model = loaded(backbone)
    assert model.info.heads == 3 and model.calibration is not None
    assert any(f"ship with medusa-chat ({NAME})" in note for note in model.info.notes)
    report = inspect(str(backbone))
    assert report.heads is not None and any(NAME in note for note in report.notes)


def test_a_folder_takes_the_heads_by_the_name_of_its_file(backbone):
    folder = str(backbone.parent)
    assert inspect(folder).heads is not None
    assert Checkpoint.find(LoadRequest(folder)).heads is not None


def test_a_name_or_a_shape_that_is_another_takes_none(shipping, tmp_path):
    other = write_gguf(tmp_path / "Tiny-1M-Instruct-mine.gguf", tiny_model())
    wide = write_gguf(tmp_path / "Tiny-1M-Instruct.gguf", tiny_model(hidden_size=64))
    for file in (other, wide):
        assert Checkpoint.find(LoadRequest(str(file))).heads is None
        assert inspect(str(file)).heads is None


def test_heads_are_named_with_a_backbone_called_as_it_likes(shipping, tmp_path):
    file = write_gguf(tmp_path / "mine.gguf", tiny_model())
    found = Checkpoint.find(LoadRequest(NAME, str(file)))
    assert found.heads.heads == 3 and found.folder == shipping and found.calibration
    with pytest.raises(ModelError, match="hidden size"):
        loaded(NAME, write_gguf(tmp_path / "wide.gguf", tiny_model(hidden_size=64)))


def test_first_answers_tell_that_heads_are_not_those_of_the_weights(backbone):
    (said,) = [note for note in loaded(backbone).info.notes if note.startswith("first answers")]
    assert "tokens a step with 4 nodes" in said and "not those that the heads" in said


def test_what_is_not_here_is_one_line_that_says_what_to_do(shipping, capsys, monkeypatch):
    command = ["generate", "--checkpoint", NAME, "--offline", "--prompt", "hi"]
    assert main(command) == 4
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and f"models pull {NAME}" in said and "--backbone FILE.gguf" in said
    here = gguf_files.LocalGguf("/models/Tiny-1M-Instruct-Q4_0.gguf", 1, "LM Studio")
    monkeypatch.setattr(shipped_heads, "local_files", lambda: (here,))
    assert main(command) == 4
    assert f"--backbone {here.path}" in capsys.readouterr().err


def test_missing_heads_are_one_line_and_the_backbone_loads_without(backbone, shipping):
    for file in shipping.iterdir():
        file.unlink()
    shipping.rmdir()
    with pytest.raises(ModelError, match="install medusa-chat again"):
        Checkpoint.find(LoadRequest(NAME, str(backbone)))
    assert loaded(backbone).info.heads == 0
