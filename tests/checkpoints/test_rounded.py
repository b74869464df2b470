"""On a CPU int8 and nf4 are blocks of whole numbers, made at the load and multiplied in C."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint
from support.engines import TREES, drafters_of, engine_of, on, tokens
from support.families import tiny
from support.loading import answer
from support.native_engines import lay_out, made_native
from support.quantised import opened, texts

from medusa_chat.checkpoints import kept_copies, native_build, prepare
from medusa_chat.decoding.backends import native_step
from medusa_chat.decoding.backends.native_layers import layer_packer
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import (
    NativeLinear,
    Quantised,
    StoredRows,
    WeightStorage,
    quantise_linears,
    quantised_bytes,
    rounded_inputs,
)
from medusa_chat.decoding.fused_layers import FusedLayer
from medusa_chat.errors import ModelError

BITS = {"int8": 8, "nf4": 4}


def rounded(model):
    """The model with the numbers that are multiplied in place of its layers' weights and of what
    they are multiplied with."""
    for name, linear in model.named_modules():
        if type(linear) is torch.nn.Linear and "lm_head" not in name:
            rows = Quantised(8)(f"{name}.weight", linear.weight)
            linear.weight.data = rows.values().to(linear.weight.dtype)
            linear.register_forward_pre_hook(lambda _, given: (rounded_inputs(given[0]),))
    return model


@pytest.mark.parametrize("kind", ["normal", "heavy", "shifted"])
@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.11)])
def test_blocks_are_near_the_weight(kind, bits, most):
    """As a share of its spread; nf4's 16 values are off by 0.092 of normal weights."""
    torch.manual_seed(0)
    drawn = {
        "normal": torch.randn(300, 256),
        "heavy": torch.distributions.StudentT(5.0).sample((300, 256)),
        "shifted": torch.randn(300, 256) + 3,
    }[kind]
    weight = (0.02 * drawn).bfloat16()
    off = StoredRows.of(weight, bits).values() - weight.float()
    share = off.square().mean().sqrt() / weight.float().std()
    assert share < (most if kind != "shifted" or bits == 4 else 0.03)
    if kind == "normal" and bits == 4:
        assert share < 0.08


@pytest.mark.parametrize("bits", [8, 4])
def test_odd_blocks_are_numbers(bits):
    """Nothing, next to nothing, one number, and the most that bf16 weights are."""
    weight = torch.zeros(5, 64)
    weight[1], weight[2, :32], weight[3, 0] = 1e-9, 3.0, 200.0
    weight[4] = torch.linspace(-300, 300, 64)
    found = StoredRows.of(weight, bits).values()
    assert found.isfinite().all()
    assert ((found - weight).abs().amax(1) <= weight.abs().amax(1) / 25 + 1e-8).all()


@pytest.mark.parametrize("precision", BITS)
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral-window", "qwen2", "phi3", "phi3-part"),
        *("qwen3", "gemma", "gpt-neox", "gpt2", "mixtral"),
    ],
)
def test_every_drafter_gives_plain_tokens(family, precision, library):
    """Of families whose pass is C, and of others with products in C; files in bf16 or fp16."""
    model = tiny(family).to(torch.float16 if family in ("llama", "gemma") else torch.bfloat16)
    backend, notes = prepare.prepare(
        model, None, torch.device("cpu"), 96, keep=Quantised(BITS[precision])
    )
    is_native = native_step.can_run(tiny(family))
    assert prepare.is_native(backend) == is_native
    linears = sum(type(m) is NativeLinear for m in model.modules())
    assert linears > 0
    assert any(f"rounded to {BITS[precision]} bits" in n for n in notes)
    engine = on(engine_of(model), backend)
    for temperature in (0.0, 0.8):
        settings = {"temperature": temperature, "seed": 1}
        plain = tokens(engine, **settings)
        for drafter in drafters_of(engine, plain, TREES["dense"], temperature):
            assert tokens(engine, drafter=drafter, **settings) == plain, type(drafter)


def test_c_multiplies_the_rounded_numbers(library):
    """A pass in C is torch's pass over a model of the numbers that stand for its weights."""
    ours = tiny("llama", intermediate_size=64)
    lay_out(ours, library, Quantised(8))
    found = made_native(engine_of(ours), library).backbone.run_chunk(torch.arange(20))
    twin = engine_of(rounded(tiny("llama", intermediate_size=64)))
    expected = twin.backbone.run_chunk(torch.arange(20))
    assert (found - expected).abs().max() < 2e-3 * expected.abs().max()


def test_a_load_rounds_and_keeps_no_copy(tmp_path, library):
    folder = write_checkpoint(tmp_path / "model")
    for precision in BITS:
        names, model = opened(folder, precision)
        assert names == ["resolve", "read", "quantise", "check", "warm up", "ready"]
        assert model.info.precision == precision
        assert prepare.is_native(model.engine.backend)
        plain, drafted = texts(model)
        assert plain == drafted
        assert answer(model)[0].precision == precision
    assert kept_copies.kept() == ()


def test_without_a_compiler_bitsandbytes_does_it(tmp_path, monkeypatch):
    monkeypatch.setenv(native_build.PLACE, "0")
    names, model = opened(write_checkpoint(tmp_path / "model"), "nf4")
    assert names.index("quantise") < names.index("check")
    assert not prepare.is_native(model.engine.backend) and len(kept_copies.kept()) == 1


def test_where_our_c_is_wrong_nothing_passes_for_rounded(library, monkeypatch):
    monkeypatch.setattr(prepare, "layer_packer", lambda *_: None)
    with pytest.raises(ModelError, match="choose --precision bf16"):
        prepare.prepare(tiny("llama").bfloat16(), None, torch.device("cpu"), 96, keep=Quantised(8))


def test_no_layer_is_merged_before_the_one_before_it_is_packed(library):
    """So that a load needs the memory of one layer in 16 bits, not of all."""
    model, seen = tiny("llama", num_hidden_layers=3).bfloat16(), []
    threads = NativeLibrary(library, 1)
    packed = layer_packer(model, threads, Quantised(4))

    def spy(name, layer):
        seen.append([type(one) is FusedLayer for one in model.model.layers])
        packed(name, layer)
        assert {type(one) for one in layer.qkv.parts} == {NativeLinear}

    prepare.replace_submodules(model, packs=False, pack_layer=spy)
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]
    assert quantised_bytes(model) > 0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_bf16_weights_are_computed_in_fp32_as_if_they_were_read_so(family, is_tied, library):
    """Bit for bit what the fp32 model of the same numbers gives."""
    found = []
    for keep in (WeightStorage(torch.float32), None):
        model = tiny(family, tie_word_embeddings=is_tied).bfloat16()
        model = model if keep else model.float()
        options = {"keep": keep} if keep else {}
        backend, _ = prepare.prepare(model, None, torch.device("cpu"), 96, **options)
        assert prepare.is_native(backend) and backend.backbone.dtype == torch.float32
        hidden = backend.backbone.run_chunk(torch.arange(20))
        found += [hidden, backend.backbone.lm_head(hidden)]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_where_no_pass_in_c_is_a_model_to_be_widened_is_fp32(library, monkeypatch):
    monkeypatch.setattr(prepare, "layer_packer", lambda *_: None)
    widened = WeightStorage(torch.float32)
    for family in ("llama", "gemma"):
        model = tiny(family).bfloat16()
        backend, _ = prepare.prepare(model, None, torch.device("cpu"), 96, keep=widened)
        assert not prepare.is_native(backend)
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["float16", "mixed"])
def test_a_config_that_calls_other_weights_bf16_rounds_none_in_fp32(kind, tmp_path, library):
    """fp32 is that of the files: with fp16, or with norms of fp32, nothing goes through bf16."""
    folder = write_checkpoint(tmp_path / "model")
    wide = load_file(folder / "model.safetensors")
    short = {n: w.half() if kind == "float16" else w.bfloat16() for n, w in wide.items()}
    if kind == "mixed":
        short |= {n: w + 1e-4 for n, w in wide.items() if "norm" in n}
    save_file(short, folder / "model.safetensors", {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    _, model = opened(folder, "fp32")
    norms = dict(model.engine.backbone.model.named_parameters())
    name = "model.norm.weight"
    assert torch.equal(norms[name], short[name].float())
    embedded = norms["model.embed_tokens.weight"]
    assert torch.equal(embedded, short["model.embed_tokens.weight"].float())
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    assert texts(opened(folder, "int8")[1])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_rotary_frequencies_stay_in_fp32(family, library):
    """In 16 bits they would turn far positions by wrong angles."""
    model = tiny(family).half()
    rotary = [name for name, _ in model.named_buffers() if "inv_freq" in name]
    for name in rotary:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, torch.rand(4) + 1e-4)
    wanted = {name: model.get_buffer(name).clone() for name in rotary}
    prepare.prepare(model, None, torch.device("cpu"), 96, keep=Quantised(8))
    assert rotary and all(torch.equal(model.get_buffer(name), wanted[name]) for name in rotary)


def test_a_linear_of_no_whole_blocks_stays(library):
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 32))
    model.get_output_embeddings = lambda: None
    assert quantise_linears(model, NativeLibrary(library, 1), Quantised(8)) == 1
    assert type(model[0]) is torch.nn.Linear and type(model[1]) is NativeLinear


def test_a_rounded_linear_says_its_dtype(library):
    """The router of hunyuan_v1_moe asks before it calls it."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32)).bfloat16()
    model.get_output_embeddings = lambda: None
    quantise_linears(model, NativeLibrary(library, 1), Quantised(8))
    assert type(model[0]) is NativeLinear and model[0].weight.dtype == torch.bfloat16
