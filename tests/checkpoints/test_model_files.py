"""Which files of a folder are a model's weights, and that every tensor in them is read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint
from support.families import FAMILIES, SLOW, tiny
from support.loading import answer, loaded
from support.tokenizers import byte_tokenizer

from medusa_chat.checkpoints import weights
from medusa_chat.checkpoints.inspection import inspect
from medusa_chat.checkpoints.layouts.headers import parse_header
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.cli.main import main
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

MODEL = "model.safetensors"
PICTURES = {"model.visual.blocks.9.attn.qkv.weight": 3, "vision_tower.patch.weight": 3}
EXTRAS = {  # unread tensors of right models
    "model.layers.0.self_attn.rotary_emb.inv_freq": 4,
    "v_head.summary.weight": 32,
    "score.weight": 32,
    "mtp.layers.0.self_attn.q_proj.weight": 32,
    "model.layers.0.self_attn.k_scale": 1,
    **PICTURES,
}


@pytest.fixture
def sharded(tmp_path):
    """A model in two files with an index."""
    folder = write_checkpoint(tmp_path / "sharded", heads=0)
    weights = load_file(folder / MODEL)
    (folder / MODEL).unlink()
    write_shards(folder, weights, "model")
    return folder


def write_shards(folder, weights, stem):
    names = sorted(weights)
    table = {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"{stem}-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
        table |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": table}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def read_empty(folder):
    byte_tokenizer().save_pretrained(folder)
    found = Checkpoint.find(LoadRequest(str(folder)))
    weights.empty_model(found, weights.config_of(found))


def text_of(folder):
    return answer(loaded(folder))[-1].text


def test_the_models_own_index_decides_beside_mistrals(sharded):
    expected = text_of(sharded)
    other = {"layers.0.attention.wq.weight": torch.zeros(32, 32), "norm.weight": torch.ones(32)}
    other |= {f"layers.0.x{n}.weight": torch.zeros(2) for n in range(9)}
    write_shards(sharded, other, "consolidated")
    assert text_of(sharded) == expected
    assert inspect(str(sharded)).problems == ()


@pytest.mark.parametrize("named_by_config", [False, True])
def test_a_stray_file_beside_a_whole_index_is_never_read(sharded, tmp_path, named_by_config):
    expected = text_of(sharded)
    torch.manual_seed(99)
    write_checkpoint(tmp_path / "other", heads=0)
    shutil.copy(tmp_path / "other" / MODEL, sharded / MODEL)
    with (sharded / "config.json").open("r+") as file:
        values = json.load(file) | ({"transformers_weights": MODEL} if named_by_config else {})
        file.seek(0)
        file.write(json.dumps(values))
        file.truncate()
    model = loaded(sharded)
    assert answer(model)[-1].text == expected
    said = f"{MODEL} is not read: model.safetensors.index.json names the model's files"
    assert said in model.info.notes and said in inspect(str(sharded)).notes


def test_a_whole_file_is_read_where_the_index_is_not(sharded, tmp_path):
    other = write_checkpoint(tmp_path / "other", heads=0)
    shutil.copy(other / MODEL, sharded / MODEL)
    (sharded / "model-00001-of-00002.safetensors").unlink()
    assert text_of(sharded) == text_of(other)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_config_with_fewer_layers_than_its_weights_is_refused(tmp_path, kind, capsys):
    folder = write_checkpoint(tmp_path / "model", heads=0)
    tiny(kind, vocab_size=256, num_hidden_layers=6).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    for command in (["inspect"], ["generate", "--prompt", "x", "--checkpoint"]):
        assert main([*command, str(folder)]) == 4
        error = capsys.readouterr().err.splitlines()[-1]
        assert "model.layers.2." in error and "its config.json is of another model" in error


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SLOW])
def test_no_right_model_is_refused_for_what_lies_beside_it(tmp_path, family):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / MODEL)
    layers = model.config.num_hidden_layers
    drafts = {f"model.layers.{layers}.eh_proj.weight": 3}
    for name, size in (EXTRAS | drafts).items():
        tensors[name] = torch.zeros(size)
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.get_input_embeddings().weight.detach().clone()
    save_file(tensors, tmp_path / MODEL, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_empty(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "lm_head.bias", "model.norm.bias"]
)
def test_a_part_that_the_config_leaves_out_is_refused_by_name(tmp_path, name):
    tiny("qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / MODEL) | {name: torch.ones(3)}
    save_file(tensors, tmp_path / MODEL, {"format": "pt"})
    with pytest.raises(ModelError, match=name):
        read_empty(tmp_path)


@pytest.mark.parametrize("inside", [b'"":""', b"[]"], ids=["texts", "lists"])
def test_a_header_of_a_million_entries_is_refused_before_it_is_parsed(inside):
    """Millions of empty texts in its metadata took seconds."""
    for opening, closing in ((b'{"__metadata__":{', b"}}"), (b'{"a":[', b"]}")):
        with pytest.raises(ValueError, match="over 1,000,000 entries"):
            parse_header(opening + b",".join([inside] * 1_000_002) + closing, 0)
