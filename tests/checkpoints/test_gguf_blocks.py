"""Weights that stay as a GGUF file has them: products with the numbers themselves, which are nearer
to the file than its bf16 weights."""

import math
import platform
from ctypes import CDLL

import gguf
import numpy as np
import pytest
import torch
from medusa_chat.checkpoints.gguf_backbone import GgufWeights, converted_folder
from safetensors.torch import load_file
from support.gguf_families import NAMES
from support.gguf_models import tiny_model, write_gguf
from support.loading import answer

from medusa_chat.checkpoints import device_plan, devices, native_build
from medusa_chat.checkpoints.layouts.contents import backbone_of
from medusa_chat.checkpoints.layouts.gguf_header import KEPT, TYPES
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.weight_storage import PARTS, StoredBlocks
from medusa_chat.decoding.backends import native_weights
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import (
    BYTES,
    HALVES,
    NIBBLES,
    Blocks,
    NativeLinear,
    pack_blocks,
    quantised_bytes,
)
from medusa_chat.messages import LoadRequest

OUTS, INS = 83, 512
SCALES = {12: (0, 2), 13: (0, 2), 14: (208,)}  # where a block's numbers of fp16 are, else the first
SIZES = {"hidden_size": 256, "intermediate_size": 256}


def stored(kind: int) -> tuple[Blocks, torch.Tensor]:
    """Random blocks of a type, and the weight [OUTS, INS] that gguf makes of them, in bf16."""
    _, each, size = TYPES[kind]
    random = np.random.default_rng(kind)
    raw = random.integers(0, 256, (OUTS * INS // each, size), dtype=np.uint8)
    for at in SCALES.get(kind, (0, 2) if kind in (3, 7) else (0,)):
        halves = random.normal(0, 0.02, (len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    numbers, scales, floors = PARTS[kind](raw)
    blocks = Blocks(
        torch.from_numpy(numbers.reshape(OUTS, INS).astype(np.int8)),
        torch.from_numpy(np.array(scales.reshape(OUTS, -1))),
        None if floors is None else torch.from_numpy(np.array(floors.reshape(OUTS, -1))),
    )
    plain = gguf.dequantize(raw.reshape(OUTS, -1), gguf.GGMLQuantizationType(kind))
    return blocks, torch.from_numpy(plain.reshape(OUTS, INS)).bfloat16()


def folder_of(path):
    """What the file was converted to."""
    return converted_folder(Checkpoint.find(LoadRequest(str(path))), "bf16").backbone


def linear_of(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight.data = weight
    linear.bias.data = linear.bias.data.bfloat16()
    return linear.requires_grad_(False)


def exact_weight(blocks: Blocks) -> torch.Tensor:
    """scale * number + floor, float64 [outs, ins]."""
    parts = blocks.numbers.double().unflatten(1, (-1, blocks.block))
    parts *= blocks.scales.double().unsqueeze(2)
    if blocks.floors is not None:
        parts += blocks.floors.double().unsqueeze(2)
    return parts.flatten(1)


def off_by(found: torch.Tensor, x: torch.Tensor, blocks: Blocks, bias: torch.Tensor) -> float:
    """The largest difference from the exact product, as a share of the largest output. Tiles round
    x to bf16, vectors to 16 bits of its block's largest: the nearer of the two counts."""
    weight, known = exact_weight(blocks).t(), []
    for given, least in ((x.bfloat16(), 1e-6), (x, 5e-5)):
        exact = given.double() @ weight + bias.double()
        known.append(float((found - exact).abs().max() / exact.abs().max()) / least)
    return min(known)


@pytest.fixture(scope="module")
def avx2(library, tmp_path_factory):
    """The library as a CPU without AVX-512 has it."""
    if platform.machine() != "x86_64":
        return library
    file = tmp_path_factory.mktemp("native") / "avx2.so"
    native_build._compile([*native_build.compiler(), "-mno-avx512f"], file)
    return CDLL(str(file))


@pytest.mark.parametrize("cpu", ["library", "avx2"])
@pytest.mark.parametrize("kind", PARTS)
def test_a_linear_multiplies_the_files_own_numbers(kind, cpu, request):
    blocks, weight = stored(kind)
    library = request.getfixturevalue(cpu)
    linear = linear_of(weight)
    ours = NativeLinear(linear, NativeLibrary(library, 2), blocks)
    plain = NativeLinear(linear, NativeLibrary(library, 2))
    assert plain.weights.kind == HALVES
    assert ours.weights.kind == (NIBBLES if KEPT[kind] < 32 else BYTES)
    assert torch.equal(torch.cat([*ours.weight_parts()]), blocks.values(slice(None)))
    assert torch.equal(torch.cat([*plain.weight_parts()]), weight.float())
    x = torch.randn(40, INS)
    whole = ours(x)
    assert off_by(whole, x, blocks, linear.bias) < 1
    assert off_by(plain(x), x, blocks, linear.bias) > 20
    for rows in (1, 2, 5, 15, 16, 17, 33):
        assert torch.equal(ours(x[:rows]), whole[:rows]), rows
        assert torch.equal(ours(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("kind", PARTS)
def test_what_it_takes_is_what_the_table_says(kind, library):
    blocks, weight = stored(kind)
    panels = NativeLinear(linear_of(weight), NativeLibrary(library, 1), blocks).panels
    rows = math.ceil(OUTS / 32) * 32 if OUTS % 32 else OUTS
    assert panels.nbytes <= rows * INS // 32 * KEPT[kind]
    assert KEPT.keys() == PARTS.keys()


@pytest.mark.parametrize("kinds", [(3, 8), (12, 14), (2, 12, 14), (8, 8)])
def test_weights_of_several_types_side_by_side_are_one(kinds, library):
    parts = [stored(kind) for kind in kinds]
    weight = torch.cat([one for _, one in parts])
    blocks = Blocks.joined([one for one, _ in parts])
    linear, threads = linear_of(weight), NativeLibrary(library, 1)
    ours, x = NativeLinear(linear, threads, blocks), torch.randn(3, INS)
    assert ours.weights.kind in (NIBBLES, BYTES)
    assert off_by(ours(x), x, blocks, linear.bias) < 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cpu", ["library", "avx2"])
def test_a_number_that_is_none_stays_none(bad, cpu, request):
    blocks, weight = stored(8)
    threads = NativeLibrary(request.getfixturevalue(cpu), 1)
    x = torch.randn(2, INS)
    x[1, 300] = bad
    found = NativeLinear(linear_of(weight), threads, blocks)(x)
    assert found[0].isfinite().all() and not found[1].isfinite().any()


def test_other_weights_than_the_files_are_told_apart():
    """As after a LoRA adapter was merged into them."""
    blocks, weight = stored(8)
    assert blocks.stands_for(weight)
    weight[7, 5] += 1
    assert not blocks.stands_for(weight)


@pytest.mark.parametrize("kind", [3, 8, 14])
def test_weights_that_c_multiplies_wrongly_are_unpacked(kind, library, monkeypatch, caplog):
    """A planted fault: the last bit of every byte is another."""
    blocks, weight = stored(kind)
    linear, threads = linear_of(weight), NativeLibrary(library, 1)

    def faulty(blocks, width):
        weights, panels = pack_blocks(blocks, width)
        panels ^= 1
        return weights, panels

    monkeypatch.setattr(native_weights, "pack_blocks", faulty)
    ours, x = NativeLinear(linear, threads, blocks), torch.randn(3, INS)
    assert ours.weights.kind == HALVES and "unpacked to bf16" in caplog.text
    assert torch.equal(ours(x), NativeLinear(linear, threads)(x))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")),
        *(("phi3", kind) for kind in ("Q4_0", "Q4_K")),
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_a_model_is_as_near_to_the_file_as_its_bf16_weights(family, kind, ties, library, tmp_path):
    model = tiny_model(family, **SIZES, tie_word_embeddings=ties)
    path = write_gguf(tmp_path / "a.gguf", model, kind)
    (*_, (_, packed)) = load(LoadRequest(str(path), precision="bf16"))
    (*_, (_, plain)) = load(LoadRequest(str(folder_of(path)), precision="bf16"))
    assert any("matrices are multiplied as the file has them" in note for note in packed.info.notes)
    assert not any("weights stay" in note for note in plain.info.notes)
    assert packed.info.memory_bytes < plain.info.memory_bytes
    assert packed.info.estimated_bytes == pytest.approx(packed.info.memory_bytes, rel=0.1)
    assert quantised_bytes(packed.engine.backbone.model) > 0
    assert answer(packed, "hello the hedgehog")[-1].stats.new_tokens > 0
    ids = torch.arange(40)
    with torch.inference_mode():
        logits = []
        (*_, (_, exact)) = load(LoadRequest(str(path), precision="fp32"))
        for one in (exact, packed, plain):
            backbone = one.engine.backbone
            backbone.cache.crop(0)
            logits.append(backbone.lm_head(backbone.run_chunk(ids)))
    sizes = logits[0].norm(dim=1)
    off = [((found - logits[0]).norm(dim=1) / sizes).nanmedian() for found in logits[1:]]
    assert off[0] < 1.5 * off[1] < 0.1  # most of it is the rounding of what is multiplied


@pytest.mark.parametrize(("kind", "precision"), [("Q4_1", "bf16"), ("F32", "fp32")])
def test_a_cpu_that_is_slow_at_bf16_multiplies_the_files_numbers_too(
    kind, precision, library, tmp_path, monkeypatch
):
    monkeypatch.setattr(devices, "has_fast_bf16", lambda: False)
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES), kind)
    (*_, (_, made)) = load(LoadRequest(str(path), device="cpu"))
    assert made.info.precision == precision
    assert (device_plan.NUMBERS in made.info.notes) == (precision == "bf16")


@pytest.mark.parametrize("family", ["llama", "mistral3"])
def test_every_matrix_of_a_file_is_found_by_its_name(family, tmp_path, monkeypatch):
    monkeypatch.setitem(NAMES, "llama", family)
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES), "Q4_1")
    files = backbone_of(LocalFolder(tmp_path))
    weights = GgufWeights.of(path, files.config, "bf16")
    with open(tmp_path / "whole.safetensors", "wb"):
        list(weights.write(tmp_path / "whole.safetensors"))
    whole, blocks = load_file(tmp_path / "whole.safetensors"), StoredBlocks(weights)
    assert files.kept > 0
    for name, weight in whole.items():
        found = blocks.blocks(name)
        assert (found is None) == (weight.dim() == 1), name
        if found is not None:
            assert torch.equal(found.values(slice(None)).bfloat16(), weight), name
            changed = weight + 1
            assert blocks([name], changed) is changed
            assert isinstance(blocks([name], weight), Blocks)
    assert blocks.blocks("nothing.weight") is None
