"""A LoRA adapter that is merged changes what peft says it changes, whatever its config's form."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.families import tiny
from transformers import AutoModelForCausalLM

from medusa_chat.checkpoints.adapters import merge_adapter, with_adapter
from medusa_chat.errors import ModelError

FILE = "adapter_model.safetensors"
TOKENS = torch.tensor([[3, 7, 1, 9, 4]])
TWO = ["q_proj", "v_proj"]
FORMS = {
    "regex": {"target_modules": r".*layers\.1\.(mlp|self_attn)\.(up|k)_proj"},
    "rank_pattern": {
        "target_modules": TWO,
        "rank_pattern": {r"layers\.0\..*q_proj": 2, "v_proj": 3},
    },
    "alpha_pattern": {
        "target_modules": TWO,
        "alpha_pattern": {r"layers\.\d+\.self_attn\.q_proj": 32, "v_proj": 1},
    },
    "layers_to_transform": {"target_modules": TWO, "layers_to_transform": [1]},
    "layers_pattern": {
        "target_modules": TWO,
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "exclude_modules": {"target_modules": TWO, "exclude_modules": r".*layers\.0.*"},
    "all-linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": TWO, "use_dora": True},
    "rslora": {"target_modules": TWO, "use_rslora": True, "rank_pattern": {"v_proj": 2}},
    "lm_head": {"target_modules": ["lm_head"]},
    "embed_tokens": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["lm_head", "embed_tokens", "q_proj"]},
}


def write_adapter(folder, family="llama", tied=False, **form):
    """A backbone and a random adapter, as peft saves them."""
    bias = {"attention_bias": True} if form.get("lora_bias") else {}
    tiny(family, tie_word_embeddings=tied, **bias).save_pretrained(folder / "base")
    wrapped = get_peft_model(backbone(folder), LoraConfig(r=4, lora_alpha=8, **form))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.rand(parameter.shape))
    wrapped.save_pretrained(folder / "adapter")
    return folder / "adapter" / FILE


def backbone(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "base")


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gemma", True)])
@pytest.mark.parametrize("form", FORMS)
def test_merged_logits_are_those_of_peft_unmerged(tmp_path, form, family, tied):
    file = write_adapter(tmp_path, family, tied, **FORMS[form])
    expected = logits(PeftModel.from_pretrained(backbone(tmp_path), file.parent))
    plain = logits(backbone(tmp_path))
    assert (expected - plain).abs().max() > 1e-2
    with_adapter(backbone(tmp_path).to("meta"), file)
    merged = merge_adapter(backbone(tmp_path), file)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_biases_of_an_adapter_are_merged_or_refused_where_there_are_none(tmp_path):
    file = write_adapter(tmp_path, target_modules=TWO, lora_bias=True)
    expected = logits(PeftModel.from_pretrained(backbone(tmp_path), file.parent))
    torch.testing.assert_close(logits(merge_adapter(backbone(tmp_path), file)), expected)
    with pytest.raises(ModelError, match="has none that they could be merged into"):
        merge_adapter(tiny("llama"), file)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"init_lora_weights": "pissa"}, "a backbone changed by pissa"),
        ({"modules_to_save": ["lm_head"]}, "modules saved whole"),
        ({"bias": "all"}, "biases of the backbone"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "repeated layers"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "too involved"),
        ({"lora_alpha": "x"}, "no valid lora_alpha"),
    ],
)
def test_what_is_no_plain_lora_is_refused_for_what_it_is(tmp_path, changes, says):
    file = write_adapter(tmp_path, target_modules=TWO)
    config = file.with_name("adapter_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=says.replace("(", r"\(")):
        merge_adapter(backbone(tmp_path), file)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.layers.7.self_attn.q_proj.lora_A.weight", torch.ones(4, 32), "does not fit"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(4, 31), "does not fit"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.full((4, 32), torch.nan), "NaN"),
        ("model.layers.0.self_attn.hada_w1_a", torch.ones(4, 32), "no part of a plain LoRA"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_weight_is_read(
    tmp_path, name, tensor, says, device
):
    file = write_adapter(tmp_path, target_modules=TWO)
    with_adapter(backbone(tmp_path).to(device), file)
    save_file(load_file(file) | {f"base_model.model.{name}": tensor}, file)
    with pytest.raises(ModelError, match=says):
        with_adapter(backbone(tmp_path).to(device), file)
