"""`inspect` refuses what a load refuses, for both read by the same readers: mutated files."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    layout_a_pt,
    layout_b_safetensors,
    layout_c_bin,
    layout_c_single,
    layout_i,
    write_checkpoint,
)
from support.gguf_models import tiny_model, write_gguf
from support.mutations import mutated, spoiled
from support.pickles import pickles_here  # noqa: F401
from support.tokenizer_trials import trials_here  # noqa: F401

from medusa_chat.checkpoints.inspection import inspect
from medusa_chat.checkpoints.load import dry_load, load
from medusa_chat.errors import MedusaChatError, ModelError
from medusa_chat.messages import LoadRequest

HEADS = "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("dry") / "backbone", heads=0)


def verdicts(place):
    """What inspect and a load say against a checkpoint; "" for nothing."""
    try:
        problems = inspect(str(place), dry_load=dry_load).problems
        inspected = problems[0] if problems else ""
    except ModelError as error:
        inspected = str(error)
    try:
        list(load(LoadRequest(str(place), precision="fp32")))
    except MedusaChatError as error:
        return inspected, str(error)
    return inspected, ""


def agree(place):
    inspected, loaded = verdicts(place)
    # what only a step shows, a load alone can tell
    is_of_steps = "plain steps by nan" in loaded
    assert is_of_steps or bool(inspected) == bool(loaded), (inspected, loaded)
    for text in (inspected, loaded):
        assert "\n" not in text and "alidation error" not in text
    return inspected


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"],
)
def test_both_say_the_same_of_a_mutated_settings_file(backbone, tmp_path, name):
    draw, refused = random.Random(name), 0
    folder = shutil.copytree(backbone, tmp_path / "model")
    whole = json.loads((folder / name).read_text())
    for _ in range(6):
        values = mutated(whole, draw)
        (folder / name).write_text(json.dumps(values))
        refused += bool(agree(folder))
    (folder / name).write_text(json.dumps(whole))
    assert agree(folder) == "", "what is not mutated loads"
    assert refused or name in ("generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_both_name_the_number_that_is_missing(backbone, tmp_path, key):
    """The load gave what transformers says somewhere inside, "look at the above report"."""
    folder = shutil.copytree(backbone, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {key: None}))
    assert all(f"no valid {key} (None): download it again" in text for text in verdicts(folder))


@pytest.mark.parametrize(
    ("write", "file"),
    [
        (layout_a_pt, "medusa_lm_head.pt"),
        (layout_c_bin, "pytorch_model.bin"),
        (layout_i, "adapter_model.safetensors"),
    ],
)
def test_both_say_the_same_of_a_spoiled_file_of_weights(backbone, tmp_path, write, file):
    shutil.copytree(backbone, tmp_path / "backbone")
    write(tmp_path / "heads", tmp_path / "backbone")
    data, draw = (tmp_path / "heads" / file).read_bytes(), random.Random(file)
    for _ in range(4):
        (tmp_path / "heads" / file).write_bytes(spoiled(data, draw))
        agree(tmp_path / "heads")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("write", [layout_b_safetensors, layout_c_single])
def test_both_refuse_heads_that_hold_no_numbers(backbone, tmp_path, write, value):
    shutil.copytree(backbone, tmp_path / "backbone")
    write(tmp_path / "heads", tmp_path / "backbone")
    file = next(f for f in (tmp_path / "heads").iterdir() if f.suffix == ".safetensors")
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("1.0.linear.weight"))
    tensors[name][3, 4] = value
    save_file(tensors, file, {"format": "pt"})
    assert "holds NaN or infinity: the heads are broken" in agree(tmp_path / "heads")


def test_both_take_a_gguf_file_and_refuse_one_of_other_tensors(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", tiny_model())
    assert agree(file) == ""
    odd = tiny_model("qwen3", num_hidden_layers=3)
    write_gguf(file, odd, qwen3__block_count=2)
    assert "layers.2" in agree(file)


def test_what_is_not_on_this_disk_is_said_to_be_unread(backbone):
    """As a Hub repo before its download."""
    from medusa_chat.checkpoints.places import open_here

    class Remote:
        def __init__(self, name):
            self._here, self.name = open_here(name), name
            self.files, self.read = self._here.files, self._here.read

    asked = []
    report = inspect(str(backbone), open_source=Remote, dry_load=asked.append)
    assert not asked and not report.problems
    assert any("only configs and the headers of weights were read" in n for n in report.notes)
