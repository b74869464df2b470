"""Every layout of Medusa heads in the wild loads, decodes, and means the same heads."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    LAYOUTS,
    heads_folder,
    layered,
    layout_b_safetensors,
    layout_c_single,
    layout_i,
    lm_head_of,
    save_pt,
    with_bias,
    with_own,
    write_adapter,
    write_checkpoint,
)
from support.loading import answer, loaded
from support.pickles import pickles_here  # noqa: F401

from medusa_chat import hub
from medusa_chat.checkpoints.head_weights import heads_of, tensors_of
from medusa_chat.checkpoints.inspection import inspect, open_anywhere
from medusa_chat.checkpoints.layouts.contents import survey
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.places import folder_or_repo
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

# Layouts whose heads are not the common ones.
OTHER = ("D .pt", "D .safetensors", "J no layers")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("layouts") / "backbone", heads=0)


@pytest.fixture(scope="module")
def plain(backbone):
    """What plain decoding says, and what medusa drafts with the common heads (layout B)."""
    folder = backbone.parent / "reference"
    layout_b_safetensors(folder, backbone)
    return drafts(loaded(folder))


def drafts(model):
    """Tokens and every draft of an answer."""
    events = answer(model, "hello there", drafter="medusa", tree="dense-2-2", max_new_tokens=24)
    return events[-1].token_ids, [event.draft.tokens for event in events[1:-1]]


def written(name, backbone, tmp_path):
    """The layout in a folder beside its backbone."""
    _, write = LAYOUTS[name]
    shutil.copytree(backbone, tmp_path / "backbone")
    write(tmp_path / "checkpoint", tmp_path / "backbone")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_told_loads_and_decodes_the_same(name, backbone, plain, tmp_path):
    folder = written(name, backbone, tmp_path)
    letter, _ = LAYOUTS[name]
    heads = survey(LocalFolder(folder)).heads
    assert heads.layout == letter and heads.heads == 3 and heads.hidden == 32
    options = {"backbone": str(tmp_path / "backbone")} if name == "G" else {}
    model = loaded(folder, **options)
    assert model.info.heads == 3
    tokens, draft = drafts(model)
    assert tokens == answer(model, "hello there", drafter="none", max_new_tokens=24)[-1].token_ids
    assert tokens == plain[0]
    if name not in OTHER:
        assert draft == plain[1]


def test_aliased_layers_mean_the_same_in_both_formats(backbone, tmp_path):
    folders = [written(name, backbone, tmp_path / name[2:]) for name in ("D .pt", "D .safetensors")]
    first, second = (drafts(loaded(folder)) for folder in folders)
    assert first == second
    assert [survey(LocalFolder(f)).heads.layers for f in folders] == [3, 3]


def test_heads_without_layers_predict_with_their_lm_head_alone(backbone, plain, tmp_path):
    """LM heads that are the backbone's, without layers: what zero layers give."""
    none = drafts(loaded(written("J no layers", backbone, tmp_path)))
    folder = heads_folder(tmp_path / "zero")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in layered().items()}
    save_file(zeros, folder / "medusa_lm_head.safetensors")
    assert none == drafts(loaded(folder)) and none[1] != plain[1]


def test_a_shortened_vocabulary_proposes_only_its_tokens(backbone, tmp_path):
    folder = heads_folder(tmp_path / "short", base_model_name_or_path=str(backbone))
    kept = torch.arange(0, 256, 2)
    names = {f"blocks.{h}.layers.0.weight": layered()[f"{h}.0.linear.weight"] for h in range(3)}
    rows = {"lm_head.weight": lm_head_of(backbone)[kept].clone(), "token_map": kept}
    save_file(names | rows, folder / "model.safetensors")
    tokens, draft = drafts(loaded(folder))
    assert tokens == answer(loaded(backbone), "hello there", max_new_tokens=24)[-1].token_ids
    assert all(token % 2 == 0 for step in draft for token in step[1:])


def with_roots(heads=3):
    torch.manual_seed(4)
    roots = {f"{h}.root.weight": torch.randn(32, 32) * 0.3 for h in range(heads)}
    return with_bias(layered()) | roots


def test_heads_that_read_the_root_load_and_keep_the_text(backbone, plain, tmp_path):
    folder = heads_folder(tmp_path / "root", base_model_name_or_path=str(backbone))
    save_file(with_roots(), folder / "medusa_lm_head.safetensors")
    heads = survey(LocalFolder(folder)).heads
    assert heads.layout == "B" and heads.root and heads.parameters == 3 * 32 * (2 * 32 + 1)
    assert heads.first(2).parameters == 2 * 32 * (2 * 32 + 1)
    tokens, draft = drafts(loaded(folder))
    assert tokens == plain[0] and draft != plain[1]


def test_heads_of_which_one_lacks_the_root_are_refused(backbone, tmp_path):
    folder = heads_folder(tmp_path / "root", base_model_name_or_path=str(backbone))
    save_file(with_roots(2), folder / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match="2 of 3 heads read the root"):
        survey(LocalFolder(folder))


def test_padded_rows_are_cut_and_said(backbone, tmp_path):
    model = loaded(written("E padded", backbone, tmp_path))
    assert any("64 padding rows" in note for note in model.info.notes)


def test_an_adapter_changes_the_backbone_as_peft_says(backbone, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "heads"
    shutil.copytree(backbone, tmp_path / "backbone")
    layout_i(folder, tmp_path / "backbone", scale=0.2)
    model = loaded(folder)
    ids = torch.arange(1, 30)[None]
    stock = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)
    with torch.no_grad():
        before = stock(ids).logits
        expected = PeftModel.from_pretrained(stock, folder)(ids).logits
        got = model.engine.backbone.model(ids).logits
    assert torch.allclose(got, expected, atol=1e-4)
    assert not torch.allclose(got, before, atol=1e-1)
    assert any("adapter" in note for note in model.info.notes)


def test_an_adapter_beside_a_whole_model_is_left_aside(backbone, tmp_path):
    folder = shutil.copytree(backbone, tmp_path / "merged")
    write_adapter(folder, scale=0.5)
    model = loaded(folder)
    assert any("ignored" in note for note in model.info.notes)
    assert answer(model)[-1].token_ids == answer(loaded(backbone))[-1].token_ids


def test_an_adapter_in_a_folder_below_names_no_other_base(backbone, tmp_path):
    folder = shutil.copytree(backbone, tmp_path / "merged")
    (folder / "no-adapter").mkdir()
    write_adapter(folder / "no-adapter", scale=0.5)
    assert answer(loaded(folder))[-1].token_ids == answer(loaded(backbone))[-1].token_ids


def test_an_nf4_backbone_takes_heads_and_an_adapter(backbone, tmp_path):
    shutil.copytree(backbone, tmp_path / "backbone")
    layout_i(tmp_path / "heads", tmp_path / "backbone", scale=0.1)
    model = loaded(tmp_path / "heads", precision="nf4")
    assert len(answer(model, drafter="medusa")[-1].token_ids) == 20


def test_heads_in_the_weights_keep_their_own_backbone(backbone, tmp_path):
    folder = tmp_path / "whole"
    layout_c_single(folder, backbone)
    with pytest.raises(ModelError, match="holds its own backbone.*omit --backbone"):
        Checkpoint.find(LoadRequest(str(folder), backbone=str(backbone)))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    changed = answer(loaded(folder), drafter="medusa")[-1].token_ids
    assert changed != answer(loaded(backbone))[-1].token_ids


def test_a_model_without_heads_takes_no_other_backbone(backbone, tmp_path):
    other = shutil.copytree(backbone, tmp_path / "other")
    with pytest.raises(ModelError, match="is a model without Medusa heads: name it or --backbone"):
        Checkpoint.find(LoadRequest(str(other), backbone=str(backbone)))
    assert "without Medusa heads" in inspect(str(other), str(backbone)).problems[0]


def test_heads_name_the_backbone_that_they_sit_on(backbone, tmp_path):
    heads = tmp_path / "heads"
    layout_i(heads, backbone, scale=0.1)
    inside = shutil.copytree(backbone, heads / "bf16")
    for place in (backbone, inside):
        found = Checkpoint.find(LoadRequest(str(heads), backbone=str(place)))
        assert found.base == str(place.resolve())
    assert Checkpoint.find(LoadRequest(str(backbone))).base == ""
    assert Checkpoint.find(LoadRequest("demo")).base == ""


def test_a_file_is_not_asked_for_at_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "weights.safetensors").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "HubSource", None)
    for name in ("owner/weights.safetensors", str(tmp_path / "owner" / "weights.safetensors")):
        with pytest.raises(ModelError, match="is a file: give the folder"):
            open_anywhere(name)
        with pytest.raises(ModelError, match="is a file: give the folder"):
            folder_or_repo(name)


def test_a_pickled_backbone_is_converted_once_and_keeps_its_end_tokens(backbone, tmp_path):
    from medusa_chat import paths

    folder = shutil.copytree(backbone, tmp_path / "pickled")
    save_pt(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    model = loaded(folder)
    assert model.engine.eos == {255}
    assert answer(model)[-1].token_ids == answer(loaded(backbone))[-1].token_ids
    (made,) = [d for d in (paths.cache_dir() / "converted").iterdir() if d.name != "known"]
    before = (made / "model.safetensors").stat().st_mtime_ns
    loaded(folder)
    assert (made / "model.safetensors").stat().st_mtime_ns == before


def test_where_the_config_lies_the_file_is_right_and_it_is_said(backbone, tmp_path):
    heads = survey(LocalFolder(written("A .pt", backbone, tmp_path))).heads
    assert heads.heads == 3
    assert heads.disagreements == ("config.json says 2 heads, the file has 3",)
    odd = survey(LocalFolder(written("J odd config", backbone, tmp_path / "odd"))).heads
    assert odd.disagreements == (
        "config.json says three heads, the file has 3",
        "config.json says None layers, the file has 1",
    )


def test_two_files_of_one_set_of_heads_take_the_safetensors(backbone, tmp_path):
    folder = written("A .pt", backbone, tmp_path)
    save_file(with_bias(layered()), folder / "medusa_lm_head.safetensors")
    found = survey(LocalFolder(folder))
    assert found.heads.files == ("medusa_lm_head.safetensors",) and found.heads.lm == "shared"
    assert found.notes == ("medusa_lm_head.pt is not read: medusa_lm_head.safetensors is",)


def test_the_size_of_heads_is_that_of_their_numbers(backbone, tmp_path):
    heads = survey(LocalFolder(written("A .safetensors", backbone, tmp_path))).heads
    each = 32 * 32 + 32 + 256 * 32
    assert heads.parameters == 3 * each and heads.bytes == 4 * 3 * each
    fewer = heads.first(2)
    assert fewer.heads == 2 and fewer.parameters == 2 * each and fewer.bytes == 4 * 2 * each
    assert {name.split(".")[0] for name in fewer.tensors} == {"0", "1"}


def test_what_heads_write_reads_back_in_every_form():
    torch.manual_seed(0)
    lm_head = torch.randn(50, 8)
    made = MedusaHeads(2, 8, layers=0, vocabulary=50, one_lm=True)
    torch.nn.init.normal_(made.lm_weight)
    again = heads_of(tensors_of(made))
    x, roots = torch.randn(3, 8), torch.arange(3)
    assert torch.allclose(made(x, roots, lm_head), again(x, roots, lm_head), atol=1e-5)
    own = heads_of(with_own({}, lm_head, layers=0, heads=2))
    assert torch.allclose(own(x, roots, lm_head)[1], x @ lm_head.T)


@pytest.mark.parametrize("name", ["A .pt", "B .safetensors", "E one LM head, prefix, .bin"])
def test_heads_deeper_than_the_only_tree_are_neither_read_nor_kept(name, backbone, tmp_path):
    folder = written(name, backbone, tmp_path)
    whole, cut = loaded(folder), loaded(folder, tree="dense-2-2")
    assert (whole.info.heads, cut.info.heads) == (3, 2)
    assert cut.info.memory_bytes < whole.info.memory_bytes
    assert any("2 of 3 heads are kept" in note for note in cut.info.notes)
    assert drafts(cut) == drafts(whole)
    assert loaded(folder, tree="auto", nodes=16).info.heads == 3
    assert loaded(folder, tree="auto", nodes=1).info.heads == 3  # the root alone needs no choice
