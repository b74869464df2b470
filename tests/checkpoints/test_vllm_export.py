"""Heads for vLLM: what is written is what it reads, and means the same heads."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    HIDDEN,
    LAYOUTS,
    heads_folder,
    layered,
    layout_a_safetensors,
    layout_b_safetensors,
    layout_i,
    lm_head_of,
    with_bias,
    write_checkpoint,
    write_heads,
    write_json,
)
from support.families import FAMILIES, tiny
from support.gguf_models import tiny_model, write_gguf
from support.loading import answer, loaded
from support.pickles import pickles_here  # noqa: F401

from medusa_chat.checkpoints import vllm_export
from medusa_chat.checkpoints.head_weights import tensors_of
from medusa_chat.checkpoints.layouts.contents import survey
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.vllm_export import VllmHeads, export_vllm, vllm_names
from medusa_chat.checkpoints.weights import read_config, read_lm_head
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, ModelError, UsageError
from medusa_chat.messages import LoadRequest

LISTED = list(range(3, 250, 3))
# What vLLM reads as its config, and what stands there for our own loader.
CONFIG = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": HIDDEN,
    "vocab_size": 256,
    "num_heads": 3,
    "num_hidden_layers": 1,
    "medusa_fc_bias": True,
    "original_lm_head": True,
    "truncated_vocab_size": 256,
}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("export") / "backbone", heads=0)


@pytest.fixture
def shared(backbone, tmp_path):
    """Heads that share the LM head, of the backbone that their config names."""
    layout_b_safetensors(tmp_path / "heads", backbone)
    return heads_at(tmp_path / "heads", backbone)


def heads_at(folder, backbone, **calibration):
    """The heads with the place of their backbone, and a calibration where there is one."""
    write_json(folder / "config.json", base_model_name_or_path=str(backbone))
    if calibration:
        known = {"accuracies": [[0.5], [0.4], [0.3]], "choices": [[0], [0, 0], [0, 0, 0]]}
        write_json(folder / "medusa_calibration.json", **known | calibration)
    return folder


def exported(folder, output, **options):
    """The last word of an export."""
    return list(export_vllm(LoadRequest(str(folder), **options), output))[-1][1]


def drafts(model, **settings):
    """Tokens, and the nodes of every draft."""
    wish = {"drafter": "medusa", "tree": "chain-3", "max_new_tokens": 24} | settings
    events = answer(model, "hello there", **wish)
    return events[-1].token_ids, [event.draft.tokens for event in events[1:-1]]


def chain_of_vllm(folder, hidden):
    """The chains that vLLM's Medusa method drafts from hidden [n, d]: int64 [n, K], by its own
    arithmetic: residual layers, LM head, the token map where the vocabulary is truncated."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    chain = []
    for head in range(config["num_heads"]):
        x = hidden
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            bias = tensors[f"{name}.bias"] if config["medusa_fc_bias"] else 0
            x = x + torch.nn.functional.silu(x @ tensors[f"{name}.weight"].T + bias)
        lm = "lm_head.weight" if config["original_lm_head"] else f"lm_heads.{head}.weight"
        assert len(tensors[lm]) == config["truncated_vocab_size"]
        best = (x @ tensors[lm].T).argmax(-1)
        is_part = config["truncated_vocab_size"] < config["vocab_size"]
        assert is_part == ("token_map" in tensors)
        chain.append(tensors["token_map"][best] if is_part else best)
    return torch.stack(chain, 1)


# What is written.


def test_shared_heads_take_the_backbones_lm_head_along(shared, backbone, tmp_path):
    made = exported(shared, tmp_path / "out")
    assert (made.heads, made.tokens, made.vocabulary) == (3, 256, 256) and not made.notes
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config == CONFIG | {"base_model_name_or_path": str(backbone)}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {f"blocks.{h}.layers.0.{part}" for h in range(3) for part in ("weight", "bias")}
    assert tensors.keys() == kinds | {"lm_head.weight"}
    assert torch.equal(tensors["lm_head.weight"], lm_head_of(backbone))
    for head in range(3):
        written = tensors[f"blocks.{head}.layers.0.weight"]
        assert torch.equal(written, layered()[f"{head}.0.linear.weight"])
    files = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert made.bytes == files


def test_heads_with_lm_heads_of_their_own_keep_each(backbone, tmp_path):
    layout_a_safetensors(tmp_path / "heads", backbone)
    exported(heads_at(tmp_path / "heads", backbone), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert not config["original_lm_head"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in tensors if "lm_head" in name] == [
        f"lm_heads.{head}.weight" for head in range(3)
    ]


def test_the_shortlist_becomes_the_token_map(shared, backbone, tmp_path):
    heads_at(shared, backbone, shortlist=LISTED)
    made = exported(shared, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["token_map"].tolist() == LISTED and made.tokens == len(LISTED)
    # vLLM 0.32 refuses a token map, "not initialized from checkpoint", unless it is told this
    assert made.command[5:] == ["--model-loader-extra-config", '{"enable_weights_track": false}']
    assert torch.equal(tensors["lm_head.weight"], lm_head_of(backbone)[LISTED])
    before, after = loaded(shared), loaded(tmp_path / "out")
    assert drafts(before) == drafts(after)
    assert all(token in LISTED for step in drafts(after)[1] for token in step[1:])


def test_several_lm_heads_are_whole_and_it_is_said(backbone, tmp_path):
    layout_a_safetensors(tmp_path / "heads", backbone)
    folder = heads_at(tmp_path / "heads", backbone, shortlist=LISTED)
    made = exported(folder, tmp_path / "out")
    assert made.tokens == 256 and "token_map" not in load_file(tmp_path / "out/model.safetensors")
    assert any("no shortlist for heads with own LM heads" in note for note in made.notes)


@pytest.mark.parametrize("listed", [(), LISTED])
@pytest.mark.parametrize("name", ["A .safetensors", "B .safetensors", "E token map"])
def test_vllms_arithmetic_gives_our_first_choices(name, listed, backbone, tmp_path):
    LAYOUTS[name][1](tmp_path / "heads", backbone)
    heads_at(tmp_path / "heads", backbone, **({"shortlist": listed} if listed else {}))
    exported(tmp_path / "heads", tmp_path / "out")
    model = loaded(tmp_path / "heads")
    hidden = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2))
    chains = chain_of_vllm(tmp_path / "out", hidden)
    engine, root = model.engine, torch.tensor([5])
    for row, chain in zip(hidden, chains, strict=True):
        logits, names = engine.heads.draft_logits(row[None], root, engine.backbone.lm_head, 3, 1)
        best = logits.argmax(-1)
        ours = best if names is None else names[best]
        if "A" not in name or not listed:  # vLLM's several LM heads have no shortlist
            assert ours.tolist() == chain.tolist()


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("I", "G")])
def test_what_is_exported_loads_here_and_drafts_the_same(name, backbone, tmp_path):
    shutil.copytree(backbone, tmp_path / "backbone")
    LAYOUTS[name][1](tmp_path / "heads", tmp_path / "backbone")
    made = exported(tmp_path / "heads", tmp_path / "out")
    assert survey(LocalFolder(tmp_path / "out")).heads.layout == "E"
    before, after = loaded(tmp_path / "heads"), loaded(tmp_path / "out")
    assert drafts(before) == drafts(after)
    served = made.command[2]
    assert drafts(loaded(served), drafter="none", tree="auto")[0] == drafts(before)[0]


@pytest.mark.parametrize("name", ["B beside its backbone", "C shards", "C .bin shards"])
def test_heads_among_the_backbones_files_leave_it_before_it_is_served(name, backbone, tmp_path):
    """vLLM reads every weight file of a folder, and fails over what is not the model's."""
    LAYOUTS[name][1](tmp_path / "heads", backbone)
    made = exported(tmp_path / "heads", tmp_path / "out")
    assert made.backbone == str(tmp_path / "out" / "backbone") == made.command[2]
    files = (tmp_path / "out" / "backbone").glob("*.safetensors")
    tensors = {name for file in files for name in load_file(file)}
    assert tensors == load_file(backbone / "model.safetensors").keys()
    assert any("backbone without the heads" in note for note in made.notes)


def test_a_gguf_backbone_is_unpacked_beside_the_heads(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(hidden_size=32))
    heads = heads_folder(tmp_path / "heads", base_model_name_or_path=str(path))
    write_heads(heads, MedusaHeads(3, 32))
    made = exported(heads, tmp_path / "out")
    assert (tmp_path / made.backbone / "config.json").is_file()
    assert any("a.gguf unpacked to bf16" in note for note in made.notes)
    assert (tmp_path / made.backbone / "tokenizer.json").is_file()
    lm_head = load_file(tmp_path / made.backbone / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["lm_head.weight"], lm_head)


def test_the_command_asks_for_as_many_tokens_as_there_are_heads(shared, tmp_path):
    command = exported(shared, tmp_path / "out").command
    assert command[:2] == ["vllm", "serve"] and command[3] == "--speculative-config"
    assert len(command) == 5
    assert json.loads(command[4]) == {
        "method": "medusa",
        "model": str(tmp_path / "out"),
        "num_speculative_tokens": 3,
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_lm_head_alone_is_the_models(family, tied, tmp_path):
    model = tiny(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    write_checkpoint(tmp_path / "tokenizer", heads=0)
    shutil.copy(tmp_path / "tokenizer" / "tokenizer.json", tmp_path)
    found = Checkpoint.find(LoadRequest(str(tmp_path)))
    read = read_lm_head(found, read_config(tmp_path))
    expected = model.get_output_embeddings().weight
    assert torch.equal(read.linear.weight, expected.to(read.linear.weight.dtype))


# What is refused.


def refusal(kind, folder, output, **options):
    """The one line of a refusal, after which nothing stands at `output`, nor beside it."""
    beside = set(output.parent.iterdir())
    with pytest.raises(kind) as caught:
        exported(folder, output, **options)
    assert set(output.parent.iterdir()) == beside
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_has_no_heads_is_refused(backbone, tmp_path):
    assert "no Medusa heads to export" in refusal(ModelError, backbone, tmp_path / "out")


def test_heads_of_an_adapted_backbone_are_refused_by_its_name(backbone, tmp_path):
    shutil.copytree(backbone, tmp_path / "backbone")
    layout_i(tmp_path / "heads", tmp_path / "backbone")
    said = refusal(ModelError, tmp_path / "heads", tmp_path / "out")
    assert "LoRA adapter adapter_model.safetensors" in said and "merge" in said


@pytest.mark.parametrize(
    ("name", "shape"), [("1.0.token.weight", (HIDDEN, HIDDEN)), ("0.0.linear.weight", (64, HIDDEN))]
)
def test_a_part_that_vllm_has_no_place_for_is_refused_by_its_name(name, shape):
    tensors = tensors_of(MedusaHeads(2, HIDDEN)) | {name: torch.zeros(shape)}
    with pytest.raises(ModelError, match=rf"heads' {name}.* cannot be exported"):
        vllm_names(tensors)


def test_heads_that_read_the_root_are_refused_with_what_to_train(backbone, tmp_path):
    folder = heads_folder(tmp_path / "heads", base_model_name_or_path=str(backbone))
    heads = MedusaHeads(2, HIDDEN, has_root=True)
    save_file(tensors_of(heads), folder / "medusa_lm_head.safetensors")
    said = refusal(ModelError, folder, tmp_path / "out")
    assert "0.root.weight cannot be exported" in said and "--no-root" in said


def test_a_shared_lm_head_with_a_bias_is_refused():
    lm_head = LogitHead(torch.nn.Linear(HIDDEN, 256), tiny("llama").config)
    with pytest.raises(ModelError, match="LM head with a bias cannot be exported"):
        VllmHeads.of(MedusaHeads(2, HIDDEN), lm_head, (), 256)


def test_several_lm_heads_over_a_part_of_the_vocabulary_are_refused(backbone, tmp_path):
    folder = heads_folder(tmp_path / "heads", base_model_name_or_path=str(backbone))
    own = {f"lm_heads.{h}.weight": lm_head_of(backbone)[LISTED].clone() for h in range(3)}
    blocks = {f"blocks.{h}.layers.0.weight": layered()[f"{h}.0.linear.weight"] for h in range(3)}
    save_file(
        own | blocks | {"token_map": torch.tensor(LISTED)}, folder / "medusa_heads.safetensors"
    )
    assert "token map and an LM head each" in refusal(ModelError, folder, tmp_path / "out")


def test_a_folder_that_exists_is_refused_before_anything_is_read(shared, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    (shared / "medusa_lm_head.safetensors").unlink()
    assert "exists: give another DIR" in refusal(UsageError, shared, tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "kept"


def test_a_full_disk_leaves_nothing_behind(shared, tmp_path, monkeypatch):
    def full(tensors, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vllm_export, "save_file", full)
    said = refusal(MedusaChatError, shared, tmp_path / "out")
    assert "No space left" in said and "free some disk space" in said


def test_a_folder_that_appears_meanwhile_is_left_alone(shared, tmp_path, monkeypatch):
    def slow(tensors, file):
        save_file(tensors, file)
        (tmp_path / "out").mkdir()

    monkeypatch.setattr(vllm_export, "save_file", slow)
    with pytest.raises(UsageError, match="exists"):
        exported(shared, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir() if "out" in file.name] == ["out"]
    assert not list((tmp_path / "out").iterdir())


def test_biases_are_written(backbone, tmp_path):
    folder = heads_folder(tmp_path / "heads", base_model_name_or_path=str(backbone))
    tensors = {n: t if "weight" in n else t + 0.5 for n, t in with_bias(layered()).items()}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    exported(folder, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["blocks.2.layers.0.bias"], torch.full((HIDDEN,), 0.5))
