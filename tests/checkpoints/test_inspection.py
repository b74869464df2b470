"""What is told about a checkpoint before it is loaded, and how near the memory estimate comes."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    heads_folder,
    layered,
    layout_a_pt,
    layout_b_safetensors,
    layout_c_single,
    layout_g,
    layout_i,
    with_own,
    write_checkpoint,
)
from support.families import FAMILIES, SLOW, tiny
from support.inspected import VICUNA
from support.loading import loaded
from support.pickles import pickles_here  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

from medusa_chat.checkpoints.inspection import inspect
from medusa_chat.checkpoints.memory_needs import estimate
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.cli.main import main
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.errors import ModelError
from medusa_chat.paths import DATA_DIR_VARIABLE


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("inspect") / "backbone", heads=0)


@pytest.fixture
def beside(backbone, tmp_path):
    """A folder that holds `backbone`."""
    shutil.copytree(backbone, tmp_path / "backbone")
    return tmp_path


def test_heads_alone_say_what_they_are_and_what_they_need(beside, capsys):
    layout_a_pt(beside / "heads", beside / "backbone")
    assert main(["inspect", str(beside / "heads")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "layout    A: heads alone, each with an LM head of its own" in out
    assert "3 of 1 layer, an LM head each, hidden 32, 256 tokens, F32" in out
    assert "medusa_lm_head.pt" in out
    assert f"backbone  {beside / 'backbone'}" in out or "../backbone" in out
    assert "config.json says 2 heads, the file has 3" in out
    for precision in ("fp32", "fp16", "int8", "nf4"):
        assert f"\n  {precision}" in out
    assert out.endswith("no problems found\n")


def test_json_has_the_same_as_plain_values(beside, capsys):
    layout_a_pt(beside / "heads", beside / "backbone")
    assert main(["inspect", str(beside / "heads"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["heads"]["layout"] == "A" and report["heads"]["heads"] == 3
    assert report["is_here"] and report["family"] == "llama" and report["problems"] == []
    parts = dict(report["memory"]["fp16"])
    total, peak = parts.pop("total"), parts.pop("peak")
    loading = max(parts.pop("loading"), parts.pop("mapped"))
    assert total == sum(parts.values()) and peak == total + loading
    assert report["auto"] in report["memory"]


def test_a_problem_is_told_and_exits_with_4(beside, capsys):
    layout_g(beside / "heads", beside / "backbone")
    assert main(["inspect", str(beside / "heads")]) == 4
    out, err = capsys.readouterr()
    assert "problem   it does not name a backbone: give --backbone ID|DIR" in out
    assert err.count("\n") == 1
    assert main(["inspect", str(beside / "heads"), "--backbone", str(beside / "backbone")]) == 0


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "medusa_lm_head.safetensors").write_bytes(b"x"), "cut short"),
        (lambda f: save_file(layered(heads=17), f / "medusa_lm_head.safetensors"), "17|16"),
        (lambda f: (f / "medusa_lm_head.safetensors").unlink(), "neither Medusa heads nor a model"),
        (
            lambda f: save_file(
                {"0.0.linear.weight": torch.zeros(8, 8)}, f / "medusa_lm_head.safetensors"
            ),
            "hidden size 8 and the backbone has 32",
        ),
        (
            lambda f: save_file(
                with_own(layered(), torch.zeros(99, 32)), f / "medusa_lm_head.safetensors"
            ),
            "for 99 tokens and the backbone has 256",
        ),
        (lambda f: (f.parent / "backbone" / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f.parent / "backbone" / "model.safetensors").unlink(), "holds no model"),
    ],
)
def test_what_is_wrong_stands_in_the_report(spoil, says, beside):
    layout_b_safetensors(beside / "heads", beside / "backbone")
    spoil(beside / "heads")
    problems = inspect(str(beside / "heads")).problems
    assert len(problems) == 1
    assert any(word in problems[0] for word in says.split("|")), problems


def test_a_family_that_cannot_be_decoded_is_a_problem(beside):
    file = beside / "backbone" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "bloom"}))
    layout_a_pt(beside / "heads", beside / "backbone")
    for name in ("backbone", "heads"):
        problems = inspect(str(beside / name)).problems
        assert any("family bloom is not supported" in problem for problem in problems)


def test_a_family_that_is_refused_is_the_only_problem(beside):
    config = {"model_type": "t5", "is_encoder_decoder": True, "d_model": 32, "vocab_size": 256}
    (beside / "backbone" / "config.json").write_text(json.dumps(config))
    (problem,) = inspect(str(beside / "backbone")).problems
    assert "family t5 is not supported: it has an encoder" in problem


@pytest.mark.parametrize(
    "name", ["openvino/openvino_model.bin", "global_step5/states.pt", "lora/my.safetensors"]
)
def test_what_lies_below_a_model_and_is_no_heads_is_left_aside(name, beside):
    place = beside / "backbone" / name
    place.parent.mkdir()
    place.write_bytes(b"anything")
    report = inspect(str(beside / "backbone"))
    assert not report.problems and any("ignored" in note for note in report.notes)


def test_a_head_of_another_kind_beside_a_model_is_left_aside(beside):
    other = {"v_head.summary.weight": torch.zeros(1, 32)}
    save_file(other, beside / "backbone" / "value_head.safetensors")
    assert not inspect(str(beside / "backbone")).problems


def test_a_backbone_elsewhere_is_named_and_not_looked_for(beside):
    heads_folder(beside / "heads", base_model_name_or_path="nobody/nothing")
    save_file(layered(), beside / "heads" / "medusa_lm_head.safetensors")
    report = inspect(str(beside / "heads"))
    assert report.backbone == "nobody/nothing" and not report.is_here and report.memory == {}
    assert any("cannot be read" in note for note in report.notes)


def test_whole_models_and_adapters_are_told(beside):
    layout_c_single(beside / "whole", beside / "backbone")
    assert inspect(str(beside / "whole")).heads.layout == "C"
    assert inspect(str(beside / "whole"), backbone="x/y").problems
    layout_i(beside / "lora", beside / "backbone")
    assert "adapter   adapter_model.safetensors" in "\n".join(inspect(str(beside / "lora")).lines())


def test_the_page_reads_headers_alone(beside):
    """A hole in the data is not noticed, torch is not imported: the page's process has none."""
    layout_b_safetensors(beside / "heads", beside / "backbone")
    file = beside / "backbone" / "model.safetensors"
    with open(file, "r+b") as stream:
        stream.seek(-100, 2)
        stream.write(b"\xff" * 100)
    code = (
        "import sys; from medusa_chat.checkpoints.inspection import inspect;"
        f"found = inspect({str(beside / 'heads')!r}).problems;"
        "print([n for n in ('torch', 'transformers', 'safetensors') if n in sys.modules], found)"
    )
    import subprocess

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[] ()", result.stderr


# The estimate.


def test_longrope_is_estimated_for_the_context_that_a_load_takes(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    told = {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
    tiny("phi3", rope_scaling=rope, **told).save_pretrained(tmp_path)
    found = {asked: inspect(str(tmp_path), context=asked) for asked in (None, 100, 9999)}
    assert [one.context for one in found.values()] == [64, 100, 512]
    assert {one.usual_context for one in found.values()} == {64}


def test_the_estimate_of_vicuna_7b_is_its_known_size():
    """6 738 415 616 parameters; 2 * 32 * 32 * 128 numbers of keys and values for each token."""
    assert sizes(VICUNA).parameters == 6_738_415_616
    parts = estimate(VICUNA, None, "fp16", 2048, 64)
    assert parts.weights == 2 * 6_738_415_616
    assert parts.cache == 2 * 32 * 32 * 128 * 2 * (2048 + 256)
    four = estimate(VICUNA, None, "nf4", 2048, 64).weights
    assert 4.1e9 < four < 4.2e9  # the scales are in fp32: 0.3e9 of it
    assert estimate(VICUNA, None, "fp16", 2048, 64, "cpu").gaps == 0


@pytest.mark.parametrize("family", FAMILIES | SLOW)
def test_parameters_and_cache_are_counted_right_for_every_family(family):
    """Within 10 % even at this size, where norms and biases weigh most."""
    model = tiny(family, hidden_size=64, intermediate_size=160)
    backbone = Backbone(model, 80)
    parts = estimate(model.config.to_dict(), None, "fp32", 80, 64, "cpu")
    measured = sum(p.numel() for p in model.parameters()) * 4
    assert parts.weights == pytest.approx(measured, rel=0.1)
    assert parts.cache == backbone.cache.nbytes


WIDE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
ROUTED = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}
COUNTED = {
    "deepseek_v3": ROUTED | LATENT | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "youtu": LATENT,
    "glm4_moe": ROUTED | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "dots1": ROUTED | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone_moe": FEW,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "qwen2_moe": FEW | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 32},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
    "doge": {"is_moe": False},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_bigcode": {"multi_query": True, "n_inner": 96},
    "longcat_flash": LATENT
    | {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32}
    | {"n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 0},
    "arcee": {},
    "jais2": {},
    "apertus": {},
    "nanochat": {},
}


@pytest.mark.parametrize("family", COUNTED)
def test_mixtures_and_ungated_families_are_counted_as_transformers_builds_them(family):
    config = AutoConfig.for_model(family, **WIDE | COUNTED[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sizes(config.to_dict()).parameters == pytest.approx(model.num_parameters(), rel=0.04)


def test_the_cache_of_latent_attention_holds_what_it_is_made_of():
    config = AutoConfig.for_model("deepseek_v3", **WIDE | COUNTED["deepseek_v3"])
    model = AutoModelForCausalLM.from_config(config)
    parts = estimate(config.to_dict(), None, "fp32", 80, 64, "cpu")
    assert parts.cache == Backbone(model, 80).cache.nbytes


@pytest.fixture(scope="module")
def pickled(backbone, tmp_path_factory):
    """A folder with pickled heads and their backbone, and a data folder: the sandbox's process
    makes safetensors of them once."""
    folder = tmp_path_factory.mktemp("pickled")
    shutil.copytree(backbone, folder / "backbone")
    layout_a_pt(folder / "heads", folder / "backbone")
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "nf4"])
def test_the_estimate_is_within_a_tenth_of_what_loads(precision, pickled, monkeypatch):
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(pickled / "data"))
    model = loaded(pickled / "heads", precision=precision, max_context=200)
    near = 0.12 if precision == "nf4" else 0.1  # whole blocks weigh most in the smallest model
    assert model.info.memory_bytes == pytest.approx(model.info.estimated_bytes, rel=near)


def test_what_a_published_config_leaves_out_is_what_its_family_has():
    """The text_config of google/gemma-3-4b-it: 3,880,099,328 parameters of text."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": text}
    whole = Gemma3Config(text_config=text).to_dict()
    assert sizes(config) == sizes(whole) and sizes(config).positions == 131_072
    assert sizes(config).parameters == pytest.approx(3_880_099_328, rel=1e-3)


@pytest.mark.parametrize("value", [None, 0, -1, True, "many", 10**12, 1.5])
def test_a_config_with_an_odd_number_is_refused(value):
    with pytest.raises(ModelError, match="no valid hidden_size"):
        sizes(VICUNA | {"hidden_size": value})


def test_a_config_with_more_layers_than_any_model_is_refused():
    with pytest.raises(ModelError, match="no valid num_hidden_layers"):  # ten seconds to count
        sizes(VICUNA | {"num_hidden_layers": 10_000_000})


def test_the_weights_of_the_backbone_are_those_of_its_header(backbone):
    config = json.loads((backbone / "config.json").read_text())
    weights = load_file(backbone / "model.safetensors")
    assert sizes(config).parameters == sum(t.numel() for t in weights.values())
