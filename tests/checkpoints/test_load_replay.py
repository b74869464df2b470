"""Loading onto a GPU, replayed on a model of torch's allocator: what a load takes from the device
is what the estimate says, without holes where layers were merged."""

from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from support.caching_allocator import CachingAllocator, Recorded
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, modeling_utils
from transformers.core_model_loading import dot_natural_key

from medusa_chat.checkpoints import memory_needs, weights
from medusa_chat.decoding.backends.replacements import replace_submodules

SCALE = 8  # of each side of the matrices that are quantised on this CPU
SHAPES = {  # of LlamaConfig
    "7B": (4096, 11008, 32, 32, 32, 32000),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


def config_of(name: str, scale: int = 1) -> LlamaConfig:
    hidden, inner, layers, heads, groups, vocabulary = SHAPES[name]
    return LlamaConfig(
        hidden_size=hidden // scale,
        intermediate_size=-(-inner // scale // 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=hidden // heads // scale,
        vocab_size=vocabulary // scale,
    )


def model_of(config: LlamaConfig):
    """A model in half precision whose tensors are placeholders."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float16)


def loaded(model, make) -> None:
    """Each parameter replaced by make(module, parameter), in transformers' order."""
    for name in sorted(dict(model.named_parameters()), key=dot_natural_key):
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        setattr(module, leaf, make(module, getattr(module, leaf)))


def on_device(module, parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter.data), requires_grad=False)


@pytest.fixture
def recorded(monkeypatch) -> Recorded:
    recorded = Recorded(CachingAllocator())
    monkeypatch.setattr(torch.cuda, "empty_cache", recorded.empty_cache)
    return recorded


def merged(recorded: Recorded, model) -> CachingAllocator:
    """The allocator after the load's own code has merged the layers."""
    replace_submodules(model, packs=False)
    recorded.empty_cache()
    return recorded.allocator


def estimated(config: LlamaConfig, precision: str) -> int:
    """Bytes of the weights and of the gaps between them."""
    parts = memory_needs.estimate(config.to_dict(), None, precision, 2048, 64)
    return parts.weights + parts.gaps


@pytest.mark.parametrize("name", SHAPES)
def test_a_load_in_half_precision_takes_what_is_estimated(recorded, name):
    config = config_of(name)
    model = model_of(config)
    with recorded:
        loaded(model, on_device)
        allocator = merged(recorded, model)
    assert allocator.allocated <= allocator.reserved <= estimated(config, "fp16")
    assert estimated(config, "fp16") <= 1.06 * allocator.reserved
    assert allocator.peak <= 1.1 * allocator.allocated


@pytest.mark.parametrize("fault", ["one block for all", "nothing given back"])
def test_the_replay_sees_holes(recorded, monkeypatch, fault):
    """Each mend alone is not enough."""
    model = model_of(config_of("7B"))
    with recorded:
        if fault == "one block for all":
            whole = torch.zeros(sum(p.nbytes for p in model.parameters()) // 2, device="meta")
            del whole
        else:
            monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        loaded(model, on_device)
        allocator = merged(recorded, model)
    assert allocator.peak > 1.1 * estimated(config_of("7B"), "fp16")


def test_transformers_takes_no_block_for_all(tmp_path, monkeypatch):
    """Its name in transformers has not changed, and is as before after a load."""
    taken = []
    before = modeling_utils.caching_allocator_warmup
    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", lambda *_: taken.append(1))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    model.save_pretrained(tmp_path)
    weight_files = SimpleNamespace(is_pickled=False, stored="")
    found = SimpleNamespace(backbone=tmp_path, settings=tmp_path, weights=weight_files)
    weights.read_model(found, model.config, "fp32", torch.device("cpu"))
    assert not taken
    AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert taken and before is not modeling_utils.caching_allocator_warmup


def test_a_load_in_4_bits_takes_what_is_estimated(recorded):
    """Quantised by bitsandbytes itself, each side an eighth, each storage 64 times its size."""
    recorded.bytes_of = lambda size: size * SCALE**2 if size > 1024 else size
    config = config_of("7B", SCALE)
    model = model_of(config)
    with recorded:
        quantised_in_place(model)
        loaded(model, quantised)
        allocator = merged(recorded, model)
    expected = estimated(config_of("7B"), "nf4")
    assert allocator.allocated <= allocator.reserved <= expected <= 1.06 * allocator.reserved


def quantised_in_place(model) -> None:
    """bitsandbytes' linears in the place of the layers' own, still without weights."""
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    sides = linear.in_features, linear.out_features
                    made = Linear4bit(
                        *sides, bias=False, compute_dtype=torch.float16, quant_type="nf4"
                    )
                    made.weight = linear.weight
                    setattr(parent, name, made)


def quantised(module, parameter):
    source = torch.zeros(parameter.shape, dtype=torch.float16)
    if not isinstance(module, Linear4bit):
        return nn.Parameter(source, requires_grad=False)
    weight = Params4bit(source, requires_grad=False, quant_type="nf4", module=module)
    return weight._quantize("cpu")
