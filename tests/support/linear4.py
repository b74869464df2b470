"""Tiny models with 4-bit linears, without bitsandbytes' kernels."""

import pytest
import torch

from medusa_chat.decoding.backends.quantised import hold
from support.families import tiny

bnb = pytest.importorskip("bitsandbytes")


WIDE = {"hidden_size": 64, "intermediate_size": 128}  # rows of whole blocks


def linear4(rows, columns=128, nested=True, seed=0, bias=False, dtype=torch.bfloat16):
    """A random 4-bit linear, its weights quantised by bitsandbytes."""
    torch.manual_seed(seed)
    made = bnb.nn.Linear4bit(
        *(columns, rows, bias, dtype), compress_statistics=nested, quant_type="nf4"
    )
    made.weight.data.normal_(std=0.1 * (seed + 1))
    hold(made)
    return made.to(dtype).to("cpu").eval().requires_grad_(False)


def weights_of(linear):
    return bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return {
        family: tiny(family, **WIDE).save_pretrained(path) or path
        for family in ("llama", "qwen2", "mistral-window", "phi3-part")
        for path in [tmp_path_factory.mktemp(family)]
    }


def quantised_model(folder, dtype=torch.float32, nested=True):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=how, device_map={"": "cpu"}
    )
    hold(model)
    return model.eval().requires_grad_(False)
