"""A LoRA adapter that is merged changes what peft says it changes, whatever its config's form."""

import json
import shutil

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


# The forms that a tied embedding changes, and those of modules that all families have alike.
EMBEDDING = ("lm_head", "embed_tokens", "both")
CASES = [
    *(("llama", False, form) for form in FORMS),
    *(("llama", True, form) for form in EMBEDDING),
    *(("gemma", True, form) for form in ("all-linear", "dora", *EMBEDDING)),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Makes a backbone on disk, each once."""
    made = {}

    def base(family="llama", tied=False, **values):
        key = (family, tied, *values.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("base")
            tiny(family, tie_word_embeddings=tied, **values).save_pretrained(made[key])
        return made[key]

    return base


@pytest.fixture(scope="module")
def usual(bases, tmp_path_factory):
    """The folder of an adapter of two modules, for copies to be spoiled."""
    return write_adapter(tmp_path_factory.mktemp("usual"), bases(), target_modules=TWO).parent


def write_adapter(folder, base, **form):
    """A random adapter, as peft saves it."""
    wrapped = get_peft_model(backbone(base), LoraConfig(r=4, lora_alpha=8, **form))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.rand(parameter.shape))
    wrapped.save_pretrained(folder / "adapter")
    return folder / "adapter" / FILE


def backbone(base):
    return AutoModelForCausalLM.from_pretrained(base)


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "tied", "form"), CASES)
def test_merged_logits_are_those_of_peft_unmerged(tmp_path, bases, form, family, tied):
    base = bases(family, tied)
    file = write_adapter(tmp_path, base, **FORMS[form])
    model = backbone(base)
    plain = logits(model)
    expected = logits(PeftModel.from_pretrained(model, file.parent))
    assert (expected - plain).abs().max() > 1e-2
    merged = merge_adapter(backbone(base), file)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    with_adapter(merged.to("meta"), file)
    if form in (*EMBEDDING, "all-linear"):  # what was tied may no longer be
        merged = merge_adapter(backbone(base), file)
        merged.save_pretrained(tmp_path / "merged")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_biases_of_an_adapter_are_merged_or_refused_where_there_are_none(tmp_path, bases):
    base = bases(attention_bias=True)
    file = write_adapter(tmp_path, base, target_modules=TWO, lora_bias=True)
    expected = logits(PeftModel.from_pretrained(backbone(base), file.parent))
    torch.testing.assert_close(logits(merge_adapter(backbone(base), file)), expected)
    with pytest.raises(ModelError, match="has no bias to merge them into"):
        merge_adapter(tiny("llama"), file)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"init_lora_weights": "pissa"}, "a backbone changed by pissa"),
        ({"modules_to_save": ["lm_head"]}, "modules saved whole"),
        ({"bias": "all"}, "biases of the backbone"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "repeated layers"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "too complex"),
        ({"lora_alpha": "x"}, "no valid lora_alpha"),
    ],
)
def test_what_is_no_plain_lora_is_refused_for_what_it_is(tmp_path, usual, changes, says):
    file = shutil.copytree(usual, tmp_path / "adapter") / FILE
    config = file.with_name("adapter_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=says.replace("(", r"\(")):
        merge_adapter(tiny("llama"), file)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.layers.7.self_attn.q_proj.lora_A.weight", torch.ones(4, 32), "does not fit"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(4, 31), "does not fit"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.full((4, 32), torch.nan), "NaN"),
        (
            "model.layers.0.self_attn.hada_w1_a",
            torch.ones(4, 32),
            "a plain LoRA adapter does not have",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_weight_is_read(
    tmp_path, usual, name, tensor, says, device
):
    file = shutil.copytree(usual, tmp_path / "adapter") / FILE
    with_adapter(tiny("llama").to(device), file)
    save_file(load_file(file) | {f"base_model.model.{name}": tensor}, file)
    with pytest.raises(ModelError, match=says):
        with_adapter(tiny("llama").to(device), file)
