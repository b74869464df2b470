"""The two checks of a load: right models pass in every kind of weights, wrong steps do not."""

import json
import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.engines import engine_of
from support.families import CONTEXT, FAMILIES, VOCABULARY, tiny
from support.native_engines import lay_out, made_native
from support.quantised import opened

from medusa_chat import paths
from medusa_chat.checkpoints import known_checks, native_build, tree_check
from medusa_chat.checkpoints.known_checks import KnownChecks
from medusa_chat.checkpoints.tree_check import (
    _weights,
    check_plain_steps,
    check_tree_step,
    reference_logits,
)
from medusa_chat.decoding import attention
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import native_step
from medusa_chat.decoding.backends.replacements import PackedLinear, replace_submodules
from medusa_chat.errors import ModelError

IDS = torch.tensor([(7 * i + 3) % VOCABULARY for i in range(12)])


def with_large_key_biases(size):
    """A Qwen2 whose scores are of hundreds with a size of 60, as the real ones' are."""
    model = tiny("qwen2", hidden_size=128, initializer_range=0.1)
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.normal_(std=size)
    return model.bfloat16()


def eager_logits(model):
    """The logits of transformers alone, float32 [12, V]."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=IDS[None], use_cache=False).logits[0].float()


def off_by(found, right):
    return float((found - right).abs().max() / right.abs().max())


def biased(runs_by, request):
    """The backbone of such a model, run by torch or by C."""
    model = with_large_key_biases(60)
    if runs_by == "torch":
        replace_submodules(model)
        return engine_of(model).backbone
    library = request.getfixturevalue("library")
    lay_out(model, library)
    return made_native(engine_of(model), library).backbone


@pytest.mark.parametrize("runs_by", ["torch", "C"])
def test_a_right_model_passes_where_eager_attention_is_off_in_16_bits(runs_by, request):
    model = with_large_key_biases(60)
    assert off_by(eager_logits(model), eager_logits(deepcopy(model).float())) > 0.1
    backbone = biased(runs_by, request)
    assert check_tree_step(backbone) == 0
    assert 0 < check_plain_steps(backbone) < 0.1


def sees_a_sibling(tensors):
    ancestors = tensors.ancestors.clone()
    ancestors[2, 1] = True
    return replace(tensors, ancestors=ancestors)


def is_off_by_one(tensors):
    return replace(tensors, depths=tensors.depths + 1)


@pytest.mark.parametrize("runs_by", ["torch", "C"])
@pytest.mark.parametrize("fault", [sees_a_sibling, is_off_by_one])
def test_a_wrong_tree_step_is_found_by_plain_steps_alone(fault, runs_by, request, monkeypatch):
    backbone = biased(runs_by, request)
    right = backbone.run_tree

    def wrong(tokens, tensors):
        return right(tokens, fault(tensors) if len(tokens) > 1 else tensors)

    monkeypatch.setattr(backbone, "run_tree", wrong)
    remedy = "--precision fp32" + (" or MEDUSA_CHAT_NATIVE=0" if runs_by == "C" else "")
    with pytest.raises(ModelError, match=f"in bfloat16: a tree step differs from .*try {remedy}"):
        check_tree_step(backbone)


def test_wrong_plain_steps_are_found_by_eager_attention(monkeypatch):
    backbone = Backbone(tiny("llama"), CONTEXT)
    right = attention.OURS["medusa_tree"]

    def wrong(*given):
        return right(*given[:4], 0.7 * given[4])

    attention.register("wrong_scale", wrong)
    backbone.attend_by("wrong_scale")
    assert check_tree_step(backbone) < 1e-4
    with pytest.raises(ModelError, match=r"a plain step differs .* more than 0\.001: choose"):
        check_plain_steps(backbone)
    del attention.OURS["wrong_scale"]
    backbone = Backbone(tiny("llama").bfloat16(), CONTEXT)
    backbone.windows = (3,)  # a window that the model does not have
    with pytest.raises(
        ModelError, match=r"in bfloat16: a plain step .* more than 0\.1: try --prec"
    ):
        check_plain_steps(backbone)


def test_no_number_is_no_small_difference():
    model = tiny("llama")
    model.model.norm.weight[0] = torch.nan
    with pytest.raises(ModelError, match="by nan"):
        check_tree_step(Backbone(model, CONTEXT))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_family_in_fp32_with_the_weights_that_are_held(family):
    """A model's own code, not what was put in its place; and all of it is there afterwards."""
    model = tiny(family).bfloat16()
    right = eager_logits(deepcopy(model).float())
    replace_submodules(model)
    backbone = Backbone(model, CONTEXT)
    before = {name: p.dtype for name, p in model.named_parameters()}
    assert off_by(reference_logits(backbone, IDS), right) < 0.02  # scales of embeddings in bf16
    assert {name: p.dtype for name, p in model.named_parameters()} == before
    assert not any("forward" in vars(module) for module in model.modules())
    assert check_plain_steps(backbone) < 0.1


def linear(bits):
    """A linear with random weights of some kind, and these weights."""
    import bitsandbytes as bnb

    torch.manual_seed(0)
    plain = torch.nn.Linear(128, 64, bias=False).requires_grad_(False).bfloat16()
    if bits == 16:
        return plain, plain.weight
    weight = plain.weight.data.clone()
    if bits == 8:
        found = bnb.nn.Linear8bitLt(128, 64, bias=False, has_fp16_weights=False)
        found.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        found = found.to("cpu").eval()
        return found, found.weight.CB.float() * found.weight.SCB[:, None] / 127
    found = bnb.nn.Linear4bit(128, 64, False, torch.bfloat16, quant_type="nf4")
    found.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    found = found.to("cpu").eval()
    return found, bnb.functional.dequantize_4bit(found.weight.data, found.weight.quant_state)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_weights_are_widened_before_and_after_the_first_product(bits):
    """bitsandbytes lays some out anew for the CPU then, with scales of 16 bits."""
    held, right = linear(bits)
    assert off_by(torch.cat([*_weights(held)]), right.float()) < 1e-6
    held(torch.ones(3, 128, dtype=torch.bfloat16))
    assert off_by(torch.cat([*_weights(held)]), right.float()) < 0.01


def test_packed_weights_are_widened():
    held, _ = linear(16)
    held = held.float()  # in bf16 only CPUs with AMX have this layout
    assert torch.equal(torch.cat([*_weights(PackedLinear(held))]), held.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "int8", "nf4"])
@pytest.mark.parametrize("native", ["0", "1"])
def test_a_load_says_what_was_compared(tmp_path, precision, native, monkeypatch):
    monkeypatch.setenv("MEDUSA_CHAT_NATIVE", native)
    notes = opened(write_checkpoint(tmp_path / "model"), precision)[1].info.notes
    said = "; ".join(notes)
    assert "plain steps agree with eager attention in fp32 (logits within" in said
    is_exact = "tree steps give the logits of plain steps bit for bit" in said
    assert is_exact or precision == "fp32"


def test_plain_steps_are_compared_once_for_a_model_as_it_is(tmp_path, monkeypatch):
    """Again where the files, the precision or our C are others, or what was kept is damaged."""
    calls = []
    right = tree_check.check_plain_steps
    monkeypatch.setattr(tree_check, "check_plain_steps", lambda b: calls.append(b) or right(b))
    folder = write_checkpoint(tmp_path / "model")
    first = opened(folder, "fp32")[1].info.notes
    assert opened(folder, "fp32")[1].info.notes == first and len(calls) == 1
    (kept,) = (paths.cache_dir() / known_checks.FOLDER).iterdir()
    (what, *_) = (name for name in json.loads(kept.read_text()) if name != known_checks.PASS)
    for damage in ("", "[]", "{}", json.dumps({what: "small"}), json.dumps({what: math.nan})):
        kept.write_text(damage)
        assert KnownChecks(kept).found(what) is None
    opened(folder, "fp32")
    assert len(calls) == 2
    opened(folder, "bf16")
    assert len(calls) == 3
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes())
    opened(folder, "fp32")
    assert len(calls) == 4
    monkeypatch.setattr(native_build, "identity", lambda: "another library")
    opened(folder, "fp32")
    assert len(calls) == 5


def test_the_pass_in_c_is_compared_once_for_a_model_as_it_is(library, tmp_path, monkeypatch):
    """And at each load for as long as it differs."""
    calls, off_by = [], 1.0
    measured = native_step.difference
    monkeypatch.setattr(
        native_step, "difference", lambda *a: calls.append(measured(*a)) or calls[-1] + off_by
    )
    folder = write_checkpoint(tmp_path / "model")
    for _ in range(2):
        assert "native backend disabled" in opened(folder, "fp32")[1].info.notes[-3]
    assert len(calls) == 2
    off_by = 0.0
    for _ in range(2):
        assert "pass in C" in "; ".join(opened(folder, "fp32")[1].info.notes)
    assert len(calls) == 3


def test_a_check_that_cannot_be_kept_costs_only_time(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "at each load" in KnownChecks(blocked / "checks" / "one.json").keep("a check", 0.01)
