"""The text part of a vision-language checkpoint: read alone, and the text that the whole writes."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.checkpoints import HIDDEN, VOCABULARY, write_heads
from support.families import SHARED, tiny
from support.loading import answer, loaded
from support.quantised import opened, texts
from support.tokenizers import byte_tokenizer
from support.training_models import conversations, write_rows
from support.vision_language import FAMILIES, TEXT, write_vision_language
from transformers import CONFIG_MAPPING

from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.adapters import merge_adapter
from medusa_chat.checkpoints.inspection import inspect
from medusa_chat.checkpoints.layouts.text_part import DEFAULTS, text_part
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.checkpoints.native_build import PLACE, compiler
from medusa_chat.checkpoints.weights import read_config, read_lm_head, read_model
from medusa_chat.cli.main import main
from medusa_chat.decoding.families import refuse_unfit
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

PROMPT = "hello, who are you?"
END = 255  # of the random models


@pytest.fixture(scope="module", params=FAMILIES)
def whole(request, tmp_path_factory):
    """(a folder with a vision-language model and heads, the model as its own class has it, its text
    part as it is loaded)"""
    folder = tmp_path_factory.mktemp("whole")
    model = write_vision_language(folder, request.param)
    write_heads(folder, MedusaHeads(3, HIDDEN))
    return folder, model, loaded(folder)


def text_of(model, tokens, count):
    """The next tokens of the whole model, by its own class and without a picture."""
    ids = torch.tensor([list(tokens)])
    made = model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tuple(token for token in made[0, len(tokens) :].tolist() if token != END)


def test_every_drafter_writes_the_text_of_the_whole_model(whole):
    _, model, read = whole
    tokens = read.tokenizer(PROMPT)["input_ids"]
    wanted = text_of(model, tokens, 40)
    for drafter in ("none", "medusa", "prompt-lookup"):
        found = answer(read, PROMPT, drafter=drafter, temperature=0.0, max_new_tokens=40)[-1]
        assert found.token_ids == wanted, drafter


def test_no_picture_weight_is_held_or_counted(whole):
    folder, model, read = whole
    report = inspect(str(folder))
    text = {*model.get_decoder().parameters(), model.get_output_embeddings().weight}
    assert read.info.parameters == sum(parameter.numel() for parameter in text)
    assert report.parameters == pytest.approx(read.info.parameters, rel=0.03)
    assert read.info.memory_bytes == pytest.approx(read.info.estimated_bytes, rel=0.1)
    assert read.info.family == report.family
    assert not report.problems and report.is_here
    said = f"only the text part of {model.config.model_type} is loaded, for text chats"
    assert said in report.notes and said in read.info.notes


def test_the_numbers_of_a_file_are_those_of_the_class(whole):
    folder, model, _ = whole
    config = json.loads((folder / "config.json").read_text())
    assert sizes(config) == sizes(model.config.to_dict())


def rewritten(folder, rename, config):
    """The same checkpoint with other names of tensors, and other keys in its config."""
    file = folder / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def of_version_5(name):
    name = name.replace("language_model.lm_head", "lm_head")
    return name.replace("language_model.model", "model.language_model")


def flat(config):
    """As published configs of Qwen2-VL are: the text part's keys among the others."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    own = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    return text | own | config


@pytest.mark.parametrize(
    ("family", "rename", "changed"),
    [("mistral3", of_version_5, dict), ("qwen2.5-vl", str, flat)],
)
def test_other_versions_of_names_and_configs_are_read(family, rename, changed, tmp_path):
    model = write_vision_language(tmp_path, family)
    config = changed(json.loads((tmp_path / "config.json").read_text()))
    rewritten(tmp_path, rename, config)
    report, read = inspect(str(tmp_path)), loaded(tmp_path)
    assert not report.problems and report.parameters == sizes(model.config.to_dict()).parameters
    tokens = read.tokenizer(PROMPT)["input_ids"]
    found = answer(read, PROMPT, drafter="none", temperature=0.0, max_new_tokens=40)[-1]
    assert found.token_ids == text_of(model, tokens, 40)
    assert "each step runs by the pass in C" in " ".join(read.info.notes) or not compiler()


def test_of_gemma_3n_the_text_part_is_read(tmp_path):
    """Its whole class needs timm."""
    sizes = TEXT | SHARED | {"tie_word_embeddings": True, "vocab_size_per_layer_input": VOCABULARY}
    model = tiny("gemma3n", **sizes)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    whole = CONFIG_MAPPING["gemma3n"](text_config=model.config.to_dict())
    rename = "model.language_model.{}".format
    rewritten(tmp_path, lambda name: rename(name.removeprefix("model.")), whole.to_dict())
    read = loaded(tmp_path)
    tokens = read.tokenizer(PROMPT)["input_ids"]
    found = answer(read, PROMPT, temperature=0.0, max_new_tokens=40)[-1]
    assert found.token_ids == text_of(model, tokens, 40)
    assert read.info.memory_bytes == pytest.approx(read.info.estimated_bytes, rel=0.1)


def test_experts_are_read_as_qwen3_vl_is_published(tmp_path):
    """As [in, out], where transformers writes them as [out, in]."""
    model = write_vision_language(tmp_path, "qwen3-vl-moe")
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {n: t.transpose(1, 2).contiguous() for n, t in tensors.items() if ".experts." in n}
    assert len(turned) == 4
    save_file(tensors | turned, tmp_path / "model.safetensors", {"format": "pt"})
    assert not inspect(str(tmp_path)).problems
    read = loaded(tmp_path)
    tokens = read.tokenizer(PROMPT)["input_ids"]
    found = answer(read, PROMPT, drafter="none", temperature=0.0, max_new_tokens=40)[-1]
    assert found.token_ids == text_of(model, tokens, 40)


@pytest.mark.parametrize("precision", ["int8", "nf4"])
@pytest.mark.parametrize("native", ["0", "1"])
def test_it_is_rounded_and_kept_under_its_own_names(precision, native, tmp_path, monkeypatch):
    monkeypatch.setenv(PLACE, native)
    write_vision_language(tmp_path, "mistral3")
    write_heads(tmp_path, MedusaHeads(3, HIDDEN))
    first, second = (opened(tmp_path, precision)[1] for _ in range(2))
    assert texts(first) == texts(second)
    copies = kept_copies.kept()
    assert len(copies) == (native == "0")
    for copy in copies:
        assert "model.embed_tokens.weight" in load_file(copy.folder / "model.safetensors")


def test_heads_are_trained_for_it_and_what_is_merged_is_a_model_of_text(tmp_path):
    write_vision_language(tmp_path / "whole", "mistral3")
    write_rows(tmp_path / "data.jsonl", conversations())
    recipe = 'method = "medusa-2"\noutput = "merged"\noptimizer = "adamw"\nlora_rank = 4\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    line = ["train", "--backbone", str(tmp_path / "whole"), "--data", str(tmp_path / "data.jsonl")]
    line += ["--output", str(tmp_path / "out"), "--recipe", str(tmp_path / "recipe.toml")]
    line += ["--device", "cpu", "--precision", "fp32", "--heads", "2", "--max-steps", "2"]
    assert main(line) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mistral"
    assert loaded(tmp_path / "out").info.heads == 2


def test_an_lm_head_of_its_own_is_read_where_the_config_says_nothing_of_it(tmp_path):
    """The classes of such models say that it is tied, those of their text parts that it is not."""
    write_vision_language(tmp_path, "mistral3")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = torch.randn(config["text_config"]["vocab_size"], HIDDEN)
    tensors = load_file(tmp_path / "model.safetensors") | {"language_model.lm_head.weight": own}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    read = read_lm_head(Checkpoint.find(LoadRequest(str(tmp_path))), read_config(tmp_path))
    assert torch.equal(read.linear.weight, own)


def test_an_adapter_of_the_whole_changes_the_text_part(tmp_path):
    model = write_vision_language(tmp_path, "llava")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["gate_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    wrapped.save_pretrained(tmp_path / "adapter")
    found = Checkpoint.find(LoadRequest(str(tmp_path)))
    text = read_model(found, read_config(tmp_path), "fp32", torch.device("cpu"))
    merged = merge_adapter(text, tmp_path / "adapter" / "adapter_model.safetensors")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.allclose(merged(ids).logits, wrapped(input_ids=ids).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("rope_parameters", ["x"], "no valid rope_parameters"),
        ("quantization_config", {"quant_method": "hqq"}, "quantised by hqq"),
    ],
)
def test_what_is_wrong_in_the_text_part_is_refused(key, value, why, tmp_path):
    write_vision_language(tmp_path, "mistral3")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert why in " ".join(inspect(str(tmp_path)).problems)


def test_modules_that_were_not_quantised_have_their_names_in_the_text_part():
    names = ["vision_tower", "language_model.lm_head", "model.language_model.layers.1.mlp"]
    method = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": names}
    text = {"model_type": "mistral"}
    part = text_part({"text_config": text, "quantization_config": method, "vision_config": {}})
    wanted = ["vision_tower", "lm_head", "model.layers.1.mlp"]
    assert part["quantization_config"] == method | {"llm_int8_skip_modules": wanted}


@pytest.mark.parametrize("family", DEFAULTS)
def test_what_a_config_leaves_out_is_what_its_class_has(family):
    config = CONFIG_MAPPING[family]().to_dict()
    assert {key: config[key] for key in DEFAULTS[family]} == DEFAULTS[family]


PUBLISHED = {
    # llava-hf/llava-1.5-7b-hf: its text part is Vicuna with 64 more tokens
    6_738_939_904: {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 32064, "torch_dtype": "float16"},
        "vision_config": {"hidden_size": 1024},
        "vocab_size": 32064,
    },
    # Qwen/Qwen2.5-VL-7B-Instruct: its text part has the numbers of Qwen2.5-7B
    7_615_616_512: {
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"hidden_size": 1280},
        "vocab_size": 152064,
    },
}


@pytest.mark.parametrize("parameters", PUBLISHED)
def test_published_configs_are_counted_as_their_text_parts(parameters):
    found = sizes(PUBLISHED[parameters])
    assert found.parameters == pytest.approx(parameters, rel=1e-3) and found.is_reached


@pytest.mark.parametrize(
    ("family", "text", "why"),
    [
        ("mllama", "mllama_text_model", "cross attention"),
        ("paligemma", "gemma", "attends a prompt both ways"),
        ("molmo2", "molmo2_text", "not a model of its own"),
        ("qwen3_5", "qwen3_5_text", "recurrent"),
        ("lfm2_vl", "lfm2", "recurrent"),
        ("step3p7", "step3p5", "no language model of it that could be read alone"),
    ],
)
def test_what_cannot_be_read_alone_is_refused_in_its_own_words(family, text, why):
    """By the numbers of a config.json, and by the config that transformers makes of it."""
    raw = {"model_type": family, "vision_config": {"depth": 1}}
    raw |= {"text_config": {"model_type": text}}
    for values in (raw, CONFIG_MAPPING[family]().to_dict()):
        with pytest.raises(ModelError, match=f"is not supported: .*{why}"):
            refuse_unfit(SimpleNamespace(**text_part(values)))
