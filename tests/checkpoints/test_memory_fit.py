"""What fits in memory: the estimate against what is held, what is chosen, and what is said."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint
from support.engines import engine_of, tokens
from support.families import tiny
from support.inspected import VICUNA
from support.loading import answer, loaded
from support.native_engines import lay_out

from medusa_chat.checkpoints import device_plan, kernel_trial, weights
from medusa_chat.checkpoints.device_plan import choose_context, split_layers
from medusa_chat.checkpoints.devices import device_memory, held_bytes, refuse_out_of_memory
from medusa_chat.checkpoints.layouts.contents import backbone_of
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory_needs import (
    SHARE,
    Cpu,
    MemoryNeeds,
    automatic_precision,
    measured,
    smaller_precisions,
)
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.cli.main import main
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import native_step
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import UNCHANGED, Quantised
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import TorchStep
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import OutOfMemoryError
from medusa_chat.messages import DeviceMemory, LoadRequest
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import InProcess
from medusa_chat.runtime.session import Session

GB = 10**9
SMALL = {
    "vocab_size": 1100,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def bare(folder: Any) -> Checkpoint:
    """A backbone's folder without tokenizer and heads."""
    files = backbone_of(LocalFolder(folder))
    assert files is not None
    return Checkpoint(str(folder), folder, folder, files, None, None, None)


def read(folder: Any, precision: str, device_map: Any = None) -> Any:
    config = weights.read_config(folder)
    device = torch.device("cpu")
    return weights.read_backbone(bare(folder), config, precision, device, device_map)[0]


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3", "gemma", "gpt-neox", "gpt2"])
def test_the_estimate_is_within_a_tenth_of_what_a_model_holds(family, tmp_path):
    changes = SMALL | ({"head_dim": 32} if family in ("qwen3", "gemma") else {})
    tiny(family, **changes).save_pretrained(tmp_path)
    cpu = Cpu(has_amx=torch.cpu._is_amx_tile_supported())
    needs = MemoryNeeds(bare(tmp_path), 96, "cpu", None, cpu)
    for precision in ("fp32", "bf16", "int8", "nf4"):
        model = read(tmp_path, precision)
        backbone = Backbone(model, 96)
        replace_submodules(model)
        held = held_bytes(model) + backbone.cache.nbytes
        assert needs.at(precision).held == pytest.approx(held, rel=0.1), precision


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "nf4"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_estimate_knows_what_our_c_code_lays_out_anew(library, tmp_path, precision, is_tied):
    tiny("llama", **SMALL, tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    needs = MemoryNeeds(bare(tmp_path), 96, "cpu", None, Cpu(has_compiler=True))
    assert needs.rounds(precision) == (precision in ("int8", "nf4"))
    keep = Quantised(4 if precision == "nf4" else 8) if needs.rounds(precision) else UNCHANGED
    model = read(tmp_path, "bf16" if needs.rounds(precision) else precision)
    lay_out(model, library, keep)
    backbone = Backbone(model, 96)
    assert native_step.attach(backbone, None, NativeLibrary(library, 1), keep)
    held = held_bytes(model, *backbone.beside) + backbone.cache.nbytes
    assert needs.at(precision).held == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_the_estimate_knows_which_fp32_weights_lie_in_bf16(library, tmp_path, is_adapted):
    """Those of bf16 files, unless an adapter was merged into them."""
    tiny("llama", **SMALL).bfloat16().save_pretrained(tmp_path)
    found = replace(bare(tmp_path), adapter="adapter" if is_adapted else None)
    needs = MemoryNeeds(found, 96, "cpu", None, Cpu(has_compiler=True))
    model = read(tmp_path, "fp32")
    if is_adapted:
        for layer in model.model.layers:
            for linear in (m for m in layer.modules() if type(m) is torch.nn.Linear):
                linear.weight.data += 1e-3 * torch.randn_like(linear.weight)
    lay_out(model, library)
    backbone = Backbone(model, 96)
    assert native_step.attach(backbone, None, NativeLibrary(library, 1))
    held = held_bytes(model, *backbone.beside) + backbone.cache.nbytes
    assert needs.at("fp32").held == pytest.approx(held, rel=0.1)


# What is chosen, with pretended memory.


def vicuna(free: int | None) -> MemoryNeeds:
    weights = SimpleNamespace(config=VICUNA, stored="", packed=0)
    found = SimpleNamespace(name="vicuna", heads=None, weights=weights, adapter=None, backbone=None)
    return MemoryNeeds(found, 2048, "cuda:0", free)


@pytest.mark.parametrize(
    ("free", "with_product", "without"),
    [
        *((24 * GB, "bf16", "bf16"), (11 * GB, "int8", "nf4"), (7 * GB, "nf4", "nf4")),
        *((4 * GB, None, None), (None, "bf16", "bf16")),
    ],
)
def test_auto_takes_16_bits_then_int8_where_our_product_is_then_nf4(free, with_product, without):
    assert replace(vicuna(free), has_int8=True).choose("bf16") == with_product
    assert vicuna(free).choose("bf16") == without
    machine = DeviceMemory("cuda:0", free or 0, 80 * GB, "bf16", has_int8=True)
    memory = {p: vicuna(None).at(p) for p in ("bf16", "int8", "nf4")}
    if free is not None:
        assert automatic_precision(memory, machine, Cpu()) == (with_product or "")
        bare = replace(machine, has_int8=False)
        assert automatic_precision(memory, bare, Cpu()) == (without or "")


def test_a_longer_context_may_take_a_smaller_precision():
    needs = replace(vicuna(20 * GB), has_int8=True)
    assert needs.choose("bf16") == "bf16"
    assert replace(needs, context=4096 * 3).choose("bf16") == "int8"


def test_what_was_measured_is_said_of_that_kind_of_device_alone():
    assert "on an H200" in measured("int8", "cuda:1", has_int8=True)
    assert measured("int8", "cuda:1", has_int8=False) == "", "another product"
    assert "KL 0.0112" in measured("nf4", "cuda", has_int8=False)
    assert "KL 0.0074" in measured("nf4", "cpu", has_int8=True)
    for precision, device in (("bf16", "cuda"), ("nf4", "mps"), ("Q4_K_M", "cpu")):
        assert measured(precision, device, has_int8=True) == ""


@pytest.mark.parametrize(
    ("capability", "kernels", "bindings", "found"),
    [
        *(((8, 9), ["product-8-bit-8-rows"], "13.5.0", True), ((7, 5), [], "13.5.0", False)),
        *(((9, 0), ["product-8-bit-8-rows"], "12.9.1", False), ((8, 6), [], "13.5.0", False)),
    ],
)
def test_our_product_of_int8_needs_a_card_its_bindings_and_its_choice(
    capability, kernels, bindings, found, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernel_trial.metadata, "version", lambda name: bindings)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(kernel_trial, "chosen_kernels", lambda device: (frozenset(kernels), ""))
    assert kernel_trial.multiplies_int8(torch.device("cuda:0")) == found
    assert not kernel_trial.multiplies_int8(torch.device("cpu"))


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(("asked", "context", "says"), [(None, 64, "short"), (65, 65, "long")])
def test_longrope_has_its_long_factors_where_the_context_asked_for_needs_them(asked, context, says):
    told = {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
    config = tiny("phi3", rope_scaling=LONGROPE, **told).config
    chosen, (note,) = choose_context(asked, config)
    assert chosen == context and f"longrope uses its {says} factors" in note
    assert choose_context(asked, tiny("phi3", max_position_embeddings=512).config)[1] == ()


@pytest.mark.parametrize("place", [{}, {"original_max_position_embeddings": 64}])
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_a_file_tells_the_usual_context_that_a_load_takes(place, kind):
    """By the factors' own length or that of the whole config, whatever the kind is called."""
    rope = LONGROPE | {"type": kind} | ({} if place else {"original_max_position_embeddings": 64})
    values = {"max_position_embeddings": 512, "rope_scaling": rope} | place
    raw = tiny("phi3").config.to_dict() | {"rope_parameters": None} | values
    if not place:
        del raw["original_max_position_embeddings"]
    assert sizes(raw).context == 64
    for one, context in ((rope, 64), ({"rope_type": "default"}, 512)):
        nested = raw | {"rope_scaling": None, "rope_parameters": {"full_attention": one}}
        assert sizes(nested).context == context


def on_cpu(bytes: int = 0, **config: Any) -> MemoryNeeds:
    """Those of a 7B model on a CPU with a compiler. bytes: of its files."""
    weights = SimpleNamespace(config=VICUNA | config, stored="", packed=0, bytes=bytes)
    found: Any = SimpleNamespace(name="vicuna", weights=weights, heads=None, adapter=None)
    return MemoryNeeds(found, 4096, "cpu", None, Cpu(has_compiler=True))


def test_where_our_c_rounds_int8_comes_before_4_bits():
    needs = on_cpu(dtype="bfloat16")
    parts = {p: needs.at(p) for p in ("fp32", "bf16", "int8", "nf4")}
    sizes = {p: one.total - one.program + one.loading for p, one in parts.items()}
    assert sizes["nf4"] < sizes["int8"] < sizes["bf16"] < sizes["fp32"]
    for precision, total in sizes.items():
        tight = replace(needs, free=int(total / SHARE) + 1)
        assert tight.choose("fp32") == precision
    assert replace(needs, cpu=Cpu()).smaller("bf16") == ("nf4",)


def test_a_bf16_model_in_fp32_needs_its_bf16_and_a_layer():
    """Unless its files have other numbers than its config says."""
    needs = on_cpu(dtype="bfloat16")
    assert needs.widens("fp32")
    wide, short = needs.at("fp32"), needs.at("bf16")
    assert wide.weights + wide.loading < 1.15 * short.weights
    assert not on_cpu(bytes=4 * 6_738_415_616, dtype="bfloat16").widens("fp32")
    assert not replace(needs, cpu=Cpu()).widens("fp32")


def test_int8_is_no_fallback_on_a_card_without_our_product_and_says_its_price():
    assert all("int8" not in smaller_precisions(p) for p in ("fp32", "bf16", "fp16", "int8", "nf4"))
    assert replace(vicuna(24 * GB), has_int8=True).remarks("int8") == ()
    assert "slower" in vicuna(24 * GB).remarks("int8")[0]
    assert vicuna(24 * GB).remarks("nf4") == ()
    assert replace(vicuna(None), device="cpu").remarks("int8") == ()


@pytest.mark.parametrize(
    ("free", "remedy"),
    [
        (11 * GB, "--precision nf4 would fit"),
        (7 * GB, "--precision nf4 would fit"),
        (5 * GB + 7 * GB // 10, "--precision nf4 --max-context 512 would fit"),
        (1 * GB, "choose a smaller model"),
        (24 * GB, "close other programs"),
        (None, "try --precision nf4, a smaller --max-context or a smaller model"),
    ],
)
def test_what_does_not_fit_is_told_what_would(free, remedy):
    line = vicuna(free).advice("bf16")
    assert remedy in line and "vicuna does not fit on cuda:0 at bf16" in line
    assert "\n" not in line


# Several devices, with pretended memory.


def wide_config() -> Any:
    return tiny("llama", num_hidden_layers=8, **SMALL).config


def wide_needs(config: Any) -> MemoryNeeds:
    parts = SimpleNamespace(stored="", packed=0, config=config.to_dict())
    found = SimpleNamespace(name="wide", heads=None, weights=parts, adapter=None)
    return MemoryNeeds(found, 96, "cuda:0", 0)


def free_for(needs: MemoryNeeds, share: float, gpus: int = 1) -> int:
    """Bytes on the first of several GPUs, on which `share` of the weights have room."""
    parts = needs.at("bf16")
    rest = parts.cache + parts.heads + parts.step + parts.gaps // gpus
    return int((rest + share * parts.weights) / SHARE)


def layers_of(found: Any) -> list[Any]:
    """Where each decoder layer lies."""
    places = found.device_map
    keys = [(f"model.layers.{i}", "model.layers", "model", "") for i in range(8)]
    return [next(places[k] for k in key if k in places) for key in keys]


def test_a_model_too_large_for_one_gpu_is_spread_in_order_over_several():
    config = wide_config()
    needs = wide_needs(config)
    whole = needs.at("bf16").total
    first = free_for(needs, 0.7, gpus=2)
    found = split_layers(config, needs, ("bf16", "int8", "nf4"), {0: first, 1: whole}, 0)
    assert found.precision == "bf16" and "no single GPU" in found.why
    places = layers_of(found)
    assert places == sorted(places) and set(places) == {0, 1}
    used = {p: sum(needs.at("bf16").weights / 8 for q in places if q == p) for p in (0, 1)}
    assert used[0] < first
    each = free_for(needs, 0.4, gpus=2)
    second = each - int(needs.at("bf16").step / SHARE)  # the step is the first one's
    smaller = split_layers(config, needs, ("bf16", "nf4"), {0: each, 1: second}, 0)
    assert smaller.precision == "nf4"


def test_layers_that_fit_on_no_gpu_lie_in_main_memory_unquantised_or_nowhere():
    config = wide_config()
    needs = wide_needs(config)
    whole = needs.at("bf16").total
    free = {0: free_for(needs, 0.7)}
    found = split_layers(config, needs, ("bf16", "int8", "nf4"), free, 100 * whole)
    assert found.precision == "bf16" and set(layers_of(found)) == {0, "cpu"}
    assert "main memory" in found.why and "slow" in found.why
    assert split_layers(config, needs, ("int8", "nf4"), {0: whole // 100}, 100 * whole) is None
    assert split_layers(config, needs, ("bf16",), {0: whole // 100}, whole // 100) is None


def test_an_offloaded_model_decodes_the_same_tokens(tmp_path):
    """Weights that accelerate brings in for each layer, here from disk: the hooks are the same."""
    tiny("llama").save_pretrained(tmp_path)
    parts = ("embed_tokens", "layers.0", "norm", "rotary_emb")
    places = {f"model.{part}": "cpu" for part in parts} | {"lm_head": "cpu"}
    model = read(tmp_path, "fp32", places | {"model.layers.1": "disk"})
    assert {p.device.type for p in model.model.layers[1].parameters()} == {"meta"}
    whole = engine_of(tiny("llama"))
    offloaded = Engine(TorchStep(Backbone(model, 96)), whole.heads)
    medusa = GenerationSettings(drafter="medusa", seed=11)
    tree = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    plain = tokens(whole)
    assert tokens(offloaded) == plain
    assert tokens(offloaded, drafter=offloaded.drafter(medusa, tree)) == plain


def test_a_system_that_does_not_tell_its_swap_has_none(monkeypatch):
    def refuse() -> None:
        raise RuntimeError("PdhAddEnglishCounterW failed. Performance counters may be disabled.")

    monkeypatch.setattr(psutil, "swap_memory", refuse)
    cpu = torch.device("cpu")
    assert 0 < device_memory(cpu, with_swap=True).free <= device_memory(cpu).total


# Out of memory.


def test_what_the_cpu_says_when_memory_is_out_becomes_one_line():
    with (
        pytest.raises(OutOfMemoryError, match="^too much$") as refusal,
        refuse_out_of_memory(lambda: "too much"),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert refusal.value.exit_code == 5
    with pytest.raises(RuntimeError, match="size"), refuse_out_of_memory(lambda: "too much"):
        torch.ones(2) @ torch.ones(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("fit") / "model")


def test_a_context_that_cannot_be_allocated_exits_with_5(folder, tmp_path, capsys):
    endless = write_checkpoint(tmp_path / "endless")
    config = json.loads((endless / "config.json").read_text())
    config["max_position_embeddings"] = 10**12
    (endless / "config.json").write_text(json.dumps(config))
    options = ["--checkpoint", str(endless), "--max-context", str(10**12), "--raw"]
    assert main(["generate", "--prompt", "x", *options]) == 5
    assert "smaller --max-context" in capsys.readouterr().err


def test_main_memory_that_is_too_small_is_told_before_anything_is_read(folder, monkeypatch):
    monkeypatch.setattr(device_plan, "_free_bytes", lambda device: 200_000)
    with pytest.raises(OutOfMemoryError, match=r"does not fit on cpu at fp32 \(it takes"):
        loaded(folder, precision="fp32")


@pytest.mark.parametrize(("failing", "remedy"), [(0, "--max-context"), (3, "--nodes")])
def test_memory_that_runs_out_in_an_answer_costs_only_that_answer(
    folder, monkeypatch, failing, remedy
):
    session = Session(InProcess())
    list(session.lifecycle.run(LoadRequest(str(folder))))
    settings = GenerationSettings(max_new_tokens=12, seed=1, nodes=4)
    expected = list(session.lifecycle.run(Reply("hello there", settings)))[-1].token_ids
    engine = session.runner.worker.loaded.engine
    engine.forget()
    linear = engine.backbone.lm_head.linear
    calls, run = iter(range(10**6)), linear.forward

    def broken(*arguments):
        if next(calls) == failing:
            torch.empty(1 << 60, dtype=torch.uint8)
        return run(*arguments)

    monkeypatch.setattr(linear, "forward", broken)
    job = session.submit(Reply("hello there", settings))
    assert job.done.wait(240)
    assert "out of memory" in job.error and remedy in job.error and "\n" not in job.error
    assert bool(job.trace) == (failing > 0) and session.state.status == "ready"
    again = session.submit(Reply("hello there", settings))
    assert again.done.wait(240) and again.trace[-1].token_ids == expected
    session.close()


# Odd models load as what they are.


def test_every_end_token_of_config_and_template_ends_the_text(tmp_path):
    made = write_checkpoint(tmp_path / "m", heads=0)
    values = json.loads((made / "generation_config.json").read_text())
    values["eos_token_id"] = [7, 255, 99_999]
    (made / "generation_config.json").write_text(json.dumps(values))
    assert {7, 255} <= loaded(made).engine.eos <= set(range(256))


def test_a_tied_lm_head_and_a_padded_vocabulary_decode_alike_with_every_drafter(tmp_path):
    """More rows than the tokenizer has tokens, as many models have."""
    made = write_checkpoint(tmp_path / "m")
    model = tiny("llama", vocab_size=320, max_position_embeddings=256, tie_word_embeddings=True)
    model.save_pretrained(made)
    assert "lm_head.weight" not in load_file(made / "model.safetensors")
    one = loaded(made)
    plain = answer(one, drafter="none")
    assert answer(one, drafter="medusa")[-1].token_ids == plain[-1].token_ids
    assert one.info.parameters == sum(t.numel() for t in model.parameters())
    assert one.info.memory_bytes == pytest.approx(one.info.estimated_bytes, rel=0.1)
    heads = load_file(made / "medusa_lm_head.safetensors")
    own = {f"{head}.1.weight": torch.zeros(384, 32) for head in range(3)}  # padded beyond both
    save_file(heads | own, made / "medusa_lm_head.safetensors")
    padded = loaded(made)
    assert any("64 padding rows" in note for note in padded.info.notes)
    assert answer(padded, drafter="medusa")[-1].token_ids == plain[-1].token_ids
