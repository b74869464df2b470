"""Linears of 4 and 8 bits: their torch reference against bitsandbytes, and where our product is
used. The kernel itself: test_products.py."""

import pytest
import torch
from support.bad_kernels import assert_bad_kernels_are_refused
from support.families import tiny
from support.linear4 import bnb, linear4, quantised_model, weights_of

from medusa_chat.decoding.backends import quantised
from medusa_chat.decoding.backends.kernels.products import TABLE
from medusa_chat.decoding.backends.quantised import (
    Int8Linear,
    Nf4Linear,
    QuantisedLinear,
    absmax,
    bucket_of,
    take_int8,
)
from medusa_chat.decoding.backends.replacements import Outputs, replace_submodules
from medusa_chat.decoding.fused_layers import FusedLayer

SIZES = [(64, 128), (96, 320), (200, 64), (320, 1088)]  # outputs, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [1, 8])
def test_the_reference_multiplies_by_what_bitsandbytes_dequantises(seed, dtype):
    for outputs, inputs in SIZES:
        linear = linear4(outputs, inputs, seed=seed, dtype=dtype)
        state = linear.weight.quant_state
        assert torch.equal(state.code, torch.tensor(TABLE))
        wanted = weights_of(linear)
        found = quantised.decoded(linear.weight.data, absmax(state), outputs, inputs)
        assert torch.equal(found.to(dtype), wanted)  # to the last bit
        made = Nf4Linear(linear)
        codes, scales, bias = made.codes, made.scales, made.bias
        assert quantised.decoded(codes, scales, outputs, inputs).equal(found)
        assert bias is None and weights_of(linear).equal(wanted)  # also by bitsandbytes


def int8(outputs, inputs, bias=True):
    torch.manual_seed(0)
    made = bnb.nn.Linear8bitLt(inputs, outputs, bias=bias, has_fp16_weights=False, threshold=6.0)
    made.weight = bnb.nn.Int8Params(
        torch.randn(outputs, inputs).half() * 0.1, requires_grad=False, has_fp16_weights=False
    )
    return made.to("cpu").eval()


@pytest.mark.parametrize("is_called", [False, True])
def test_8_bits_are_taken_as_they_are_and_activations_stay_whole(is_called):
    stock, x = int8(96, 320), torch.randn(7, 320).half()
    if is_called:
        stock(x)
    codes, scales = stock.weight.data.clone(), (stock.weight.SCB, stock.state.SCB)
    model = torch.nn.ModuleDict({"one": torch.nn.Sequential(stock)})
    take_int8(model)
    linear = model["one"][0]
    assert isinstance(linear, Int8Linear) and linear.codes.equal(codes)
    scale = next(found for found in scales if found is not None)
    weights = (codes * scale[:, None] / 127).half()
    assert linear(x).equal(torch.nn.functional.linear(x, weights, stock.bias.half()))
    rows = linear(x[:1])
    assert torch.allclose(rows, linear(x)[:1], atol=2e-3)  # whatever else there is


def test_layers_of_8_bits_are_merged_with_equal_results(tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny("qwen2", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    how = BitsAndBytesConfig(load_in_8bit=True)
    kinds = {"dtype": torch.float32, "quantization_config": how}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **kinds).eval().requires_grad_(False)
    take_int8(model)
    ids = torch.randint(3, 48, (1, 20), generator=torch.Generator().manual_seed(0))
    wanted = model(ids).logits
    notes = replace_submodules(model)
    layer = model.model.layers[0]
    assert "2 layers merged" in notes and isinstance(layer, FusedLayer)
    assert isinstance(layer.qkv, Int8Linear) and layer.qkv.bias is not None
    assert isinstance(layer.stock.self_attn.k_proj, Outputs)
    assert torch.allclose(model(ids).logits, wanted, atol=1e-5)  # each by the stock layer
    model.set_attn_implementation("medusa_tree")
    assert torch.allclose(model(ids).logits, wanted, atol=1e-4)


def test_the_kernel_is_for_1_to_64_rows():
    buckets = {rows: bucket_of(rows) for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65)}
    assert list(buckets.values()) == [8, 8, 16, 16, 32, 32, 64, 64, None]


def test_without_a_gpu_no_model_gets_the_kernel(folder):
    model = quantised_model(folder["llama"])
    replace_submodules(model)
    notes = quantised.use_products(model, torch.float16, dict.fromkeys((4, 8), frozenset({8})))
    assert len(notes) == 4 and all("stay bitsandbytes'" in note for note in notes)
    assert not any(isinstance(module, QuantisedLinear) for module in model.modules())


@pytest.mark.parametrize("used", [{8, 16, 64}, {16, 64}, set()])
def test_it_is_used_for_the_rows_that_are_chosen(folder, monkeypatch, used):
    model = quantised_model(folder["llama"])
    replace_submodules(model)
    ids = torch.randint(3, 48, (1, 20), generator=torch.Generator().manual_seed(0))
    wanted, calls = model(ids).logits, []

    def own(self, hidden):
        calls.append(hidden.shape[-2])
        x = hidden.flatten(0, -2)
        out = x @ weights_of(self.stock).to(x.dtype).T
        return out.unflatten(0, hidden.shape[:-1])

    monkeypatch.setattr(quantised, "has_kernel", lambda *asked: True)
    monkeypatch.setattr(Nf4Linear, "own", own)
    chosen = {4: frozenset(used), 8: frozenset()}
    notes = quantised.use_products(model, torch.float32, chosen)
    layer = model.model.layers[1]
    linears = layer.qkv, layer.out, layer.gate_up, layer.down
    assert all(isinstance(linear, Nf4Linear) for linear in linears) is bool(used)
    if not used:
        assert all("stay bitsandbytes'" in note for note in notes)
        return
    assert {linear.buckets for linear in linears} == {frozenset(used)} and len(notes) == 4
    assert all("4-bit product" in note and note.endswith(", 64") for note in notes)
    model.set_attn_implementation("medusa_tree")
    assert torch.allclose(model(ids).logits, wanted, atol=2e-4)  # 20 rows: bitsandbytes'
    assert calls == []
    model(ids[:, :12])
    assert calls == [12] * 8  # four products of each of two layers


@pytest.mark.parametrize("bits", [4, 8])
def test_a_kernel_that_fails_or_is_wrong_is_said_once_and_not_used(monkeypatch, caplog, bits):
    asked = monkeypatch, caplog, torch.float16, bits
    assert_bad_kernels_are_refused(quantised, *asked)
    assert not quantised.has_kernel(torch.device("cuda"), torch.float32, bits)
