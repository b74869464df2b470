"""Merged linears of 4 bits: the very weights of the several, held once, and the same tokens."""

import weakref

import pytest
import torch
from support.checkpoints import HIDDEN, write_checkpoint, write_heads
from support.engines import TREES, drafters_of, engine_of, tokens
from support.families import tiny
from support.linear4 import WIDE, bnb, linear4, quantised_model, weights_of
from support.quantised import opened, texts

from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.devices import held_bytes
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding.backends.quantised import absmax, can_merge, is_linear4, merge4, release
from medusa_chat.decoding.backends.replacements import Outputs, replace_submodules
from medusa_chat.decoding.fused_layers import FusedLayer
from medusa_chat.decoding.heads import MedusaHeads

CASES = [("llama", torch.float32, True), ("qwen2", torch.float32, True)]
CASES += [("mistral-window", torch.float32, False), ("llama", torch.bfloat16, True)]
CASES += [("phi3-part", torch.float32, True)]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_merged_linear_holds_the_very_weights_of_the_several(nested, dtype):
    parts = [linear4(n, 128, nested, seed, True, dtype) for seed, n in enumerate((96, 32, 320))]
    wanted = torch.cat([weights_of(part) for part in parts])
    assert can_merge(*parts)
    whole = merge4(*parts)
    assert torch.equal(weights_of(whole), wanted)
    assert torch.equal(whole.bias, torch.cat([part.bias for part in parts]))
    assert not whole.weight.quant_state.nested and is_linear4(whole)
    for rows in (1, 8, 70):
        x = torch.randn(rows, 128, dtype=dtype)
        outs = torch.cat([part(x) for part in parts], -1)
        assert torch.allclose(whole(x), outs, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_only_what_is_whole_blocks_is_laid_out_anew_and_rows_stay_alone():
    able = bnb.functional.has_avx512bf16()
    for rows, columns, is_whole in ((96, 128, True), (40, 128, False), (32, 32, False)):
        linear = linear4(rows, columns)
        x = torch.randn(9, columns, dtype=torch.bfloat16)
        wanted = linear(x)
        assert not getattr(linear.weight.quant_state, "packing_format_for_cpu", False)
        assert release(linear) == (
            ["1 linears of 4 bits converted for this CPU's bf16"] if able and is_whole else []
        )
        found = linear(x)
        assert (found - wanted).abs().max() < 2e-2 * wanted.abs().max()
        is_moved = getattr(linear.weight.quant_state, "packing_format_for_cpu", False)
        assert is_moved == (able and is_whole)
        if is_moved:
            assert all(torch.equal(linear(x[i : i + 1])[0], found[i]) for i in range(9))


def test_linears_that_an_adapter_was_merged_into_are_merged_with_the_others():
    """peft quantises their sum in fp32 anew; the product is in the model's format as before."""
    parts = [linear4(64), linear4(64, seed=1), linear4(64, seed=2)]
    wanted = torch.cat([weights_of(part) for part in parts])
    parts[1].weight.quant_state.dtype = torch.float32
    assert can_merge(*parts) and torch.equal(weights_of(merge4(*parts)), wanted)
    parts[1].weight.quant_state.dtype = torch.float16
    assert not can_merge(*parts)


def test_the_scales_are_those_that_bitsandbytes_decodes():
    state = linear4(512, 256).weight.quant_state
    assert state.nested
    inner = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    assert torch.equal(absmax(state), inner)


def test_what_would_not_be_the_same_is_not_merged():
    one = linear4(64, 128)
    assert not can_merge(one, linear4(64, 96))  # a block would reach over two rows
    assert not can_merge(linear4(64, 96), linear4(64, 96))
    assert not can_merge(one, linear4(64, 128, bias=True))
    assert not can_merge(one, linear4(64, 128, dtype=torch.float32))
    moved = linear4(64, 128)
    moved.weight.quant_state.packing_format_for_cpu = True
    assert not can_merge(one, moved)
    assert not can_merge(one, bnb.nn.Linear4bit(128, 64, quant_type="nf4"))  # not quantised yet


@pytest.mark.parametrize(("family", "dtype", "nested"), CASES)
def test_a_merged_model_of_4_bits_decodes_like_the_stock_one(folder, family, dtype, nested):
    expected = tokens(engine_of(quantised_model(folder[family], dtype, nested)))
    model = quantised_model(folder[family], dtype, nested)
    notes = replace_submodules(model)
    assert "2 layers merged" in notes
    assert {type(layer) for layer in model.model.layers} == {FusedLayer}
    engine = engine_of(model)
    engine.heads.to(dtype)
    assert check_steps(engine.backbone) < (1e-4 if dtype == torch.float32 else 0.1)
    plain = tokens(engine)
    assert plain == expected
    for drafter in drafters_of(engine, plain, TREES["dense"], 0.0):
        assert tokens(engine, drafter=drafter) == plain


def test_a_merged_layer_gives_what_the_stock_layer_gives(folder):
    ids = torch.randint(3, 48, (1, 20), generator=torch.Generator().manual_seed(0))
    stock = quantised_model(folder["qwen2"])
    wanted = stock(ids).logits
    replace_submodules(stock)
    for implementation in ("medusa_tree", "eager"):
        stock.set_attn_implementation(implementation)
        assert torch.allclose(stock(ids).logits, wanted, atol=2e-4)


def test_nothing_is_held_twice(folder):
    model = quantised_model(folder["llama"])
    layer = model.model.layers[0]
    before = held_bytes(layer)
    old = [weakref.ref(p.weight) for p in (layer.self_attn.q_proj, layer.mlp.up_proj)]
    weights = sum(p.in_features * p.out_features for p in merged_of(layer))
    replace_submodules(model)
    layer = model.model.layers[0]
    assert [ref() for ref in old] == [None, None]  # without waiting for the cycles to be found
    assert isinstance(layer.stock.mlp.up_proj, Outputs)
    assert layer.stock.mlp.up_proj.whole is layer.gate_up
    more = held_bytes(layer) - before
    assert more <= weights * 3 / 64 + 4096  # a scale of 4 bytes for 1, and what norms need


def merged_of(layer):
    attention, mlp = layer.self_attn, layer.mlp
    return attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj


def test_rows_that_share_blocks_stay_as_they_are(tmp_path):
    tiny("llama").save_pretrained(tmp_path)  # 32 inputs
    model = quantised_model(tmp_path)
    assert not any("merged" in note for note in replace_submodules(model))
    assert not any(isinstance(module, Outputs) for module in model.modules())


def test_the_kept_copy_is_the_stock_one_and_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_CHAT_NATIVE", "0")  # with a compiler our C does it on a CPU
    folder = write_checkpoint(tmp_path / "model")
    model = tiny("llama", vocab_size=256, max_position_embeddings=256, **WIDE)
    model.generation_config.eos_token_id = 255
    model.save_pretrained(folder)
    assert HIDDEN != 64
    write_heads(folder, MedusaHeads(3, 64))
    phases, made = opened(folder, "nf4")
    assert "quantise" in phases and any("layers merged" in note for note in made.info.notes)
    plain, medusa = texts(made)
    assert plain == medusa and len(kept_copies.kept()) == 1
    phases, again = opened(folder, "nf4")
    assert "quantise" not in phases and texts(again) == [plain, plain]
    assert again.info.memory_bytes == made.info.memory_bytes
    assert again.info.memory_bytes == pytest.approx(again.info.estimated_bytes, rel=0.1)
