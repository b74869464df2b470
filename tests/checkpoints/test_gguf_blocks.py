"""Weights that stay as a GGUF file has them: products with the numbers themselves, which are nearer
to the file than its bf16 weights."""

import math
import platform
from ctypes import CDLL

import gguf
import numpy as np
import pytest
import torch
from support.gguf_families import NAMES
from support.gguf_models import tiny_model, write_gguf
from support.loading import answer

from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.gguf_model import gguf_model
from medusa_chat.checkpoints.gguf_rows import PARTS, FileRows
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.layouts.gguf_header import TYPES
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.weights import config_of, read_model
from medusa_chat.decoding.backends import native_weights
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import (
    BYTES,
    HALVES,
    NIBBLES,
    Blocks,
    NativeLinear,
    pack_blocks,
)
from medusa_chat.errors import ModelError
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


def found_in(path):
    """The file with the folder of its settings."""
    return with_settings(Checkpoint.find(LoadRequest(str(path))))


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
    assert ours.weights.kind == (NIBBLES if kind in (2, 3, 12) else BYTES)
    assert torch.equal(torch.cat([*ours.weight_parts()]), blocks.values(slice(None)))
    assert torch.equal(torch.cat([*plain.weight_parts()]), weight.float())
    x = torch.randn(40, INS)
    whole = ours(x)
    assert off_by(whole, x, blocks, linear.bias) < 1
    assert off_by(plain(x), x, blocks, linear.bias) > 20
    for rows in (1, 2, 5, 15, 16, 17, 33):
        assert torch.equal(ours(x[:rows]), whole[:rows]), rows
        assert torch.equal(ours(x[-rows:]), whole[-rows:]), rows


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


FAMILIES = (
    "mistral qwen2 qwen3 gemma2 gemma3 phi3 granite cohere2 olmo2 glm4 exaone4 mixtral gpt_oss"
)
NEAR = 0.1  # of the length of the logits; bf16 alone gives 0.04 in such random models


@pytest.mark.parametrize(
    ("family", "kind", "ties"),
    [
        *(("llama", kind, False) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")),
        *(("llama", kind, True) for kind in ("Q5_1", "Q4_K", "Q2_K")),
        *((family, "Q4_0", None) for family in FAMILIES.split()),
    ],
)
def test_a_packed_model_has_the_logits_of_the_unpacked_one(family, kind, ties, library, tmp_path):
    told = {} if ties is None else {"tie_word_embeddings": ties}
    path = write_gguf(tmp_path / "a.gguf", tiny_model(family, **SIZES, **told), kind)
    (*_, (_, packed)) = load(LoadRequest(str(path), device="cpu"))
    assert packed.info.precision == kind
    assert packed.info.estimated_bytes == pytest.approx(packed.info.memory_bytes, rel=0.1)
    found = found_in(path)
    plain = read_model(found, config_of(found), "fp32", torch.device("cpu"))
    ids, backbone = torch.arange(40), packed.engine.backbone
    with torch.inference_mode():
        backbone.cache.crop(0)
        ours = backbone.lm_head(backbone.run_chunk(ids)).float()
        theirs = plain(ids[None]).logits[0]
    off = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    assert float(off.nanmedian()) < NEAR
    assert answer(packed, "hello the hedgehog")[-1].stats.new_tokens > 0


def test_a_load_holds_the_file_and_never_a_second_copy(library, tmp_path, monkeypatch):
    """By the sizes of what is held: matrices in blocks lie in memory once, as they are packed."""
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES, num_hidden_layers=4), "Q4_0")
    found = found_in(path)
    rows = FileRows(GgufWeights.of(found))
    held = gguf_model(found, config_of(found), torch.bfloat16, torch.device("cpu"), True)
    floats = {name: p.nbytes for name, p in held.named_parameters() if not p.is_meta}
    assert not any("proj" in name or "lm_head" in name for name in floats)
    (*_, (_, loaded)) = load(LoadRequest(str(path), device="cpu"))
    backbone = loaded.engine.backbone
    known = rows.bytes + sum(floats.values()) + backbone.cache.nbytes
    assert loaded.info.memory_bytes < 1.15 * known
    assert not any(p.is_meta for p in backbone.model.parameters())


def test_a_scale_that_is_no_number_is_refused_by_the_tensors_name(library, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES), "Q8_0")
    tensor = GgufWeights.of(found_in(path)).header.tensors["blk.0.ffn_up.weight"]
    with open(path, "r+b") as file:
        file.seek(tensor.start + 34 * 5)
        file.write(np.float16(np.nan).tobytes())
    for precision in ("auto", "fp32"):
        with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight holds values"):
            list(load(LoadRequest(str(path), device="cpu", precision=precision)))


@pytest.mark.parametrize("family", ["llama", "mistral3"])
def test_every_matrix_of_a_file_is_found_by_its_name(family, tmp_path, monkeypatch):
    monkeypatch.setitem(NAMES, "llama", family)
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES), "Q4_1")
    found = found_in(path)
    whole = read_model(found, config_of(found), "bf16", torch.device("cpu")).state_dict()
    rows = FileRows(GgufWeights.of(found))
    for name, weight in whole.items():
        assert rows.is_in_blocks(name) == (weight.dim() > 1), name
        if weight.dim() > 1:
            assert torch.equal(rows.blocks(name).values(slice(None)).bfloat16(), weight), name
    assert not rows.is_in_blocks("nothing.weight")
