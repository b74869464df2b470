"""Weights that stay as a GGUF file has them: products with the numbers themselves, which are nearer
to the file than its bf16 weights."""

import math
import platform
from ctypes import CDLL

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.gguf_families import NAMES
from support.gguf_models import tiny_model, write_gguf
from support.loading import answer

from medusa_chat.checkpoints import device_plan, devices, native_build
from medusa_chat.checkpoints.gguf_backbone import GgufWeights, converted_folder
from medusa_chat.checkpoints.layouts.contents import backbone_of
from medusa_chat.checkpoints.layouts.gguf_header import KEPT, TYPES
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.tree_check import reference_logits
from medusa_chat.checkpoints.weight_storage import FileRows
from medusa_chat.decoding.backends import native_weights
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import (
    HALVES,
    PACKED,
    NativeLinear,
    StoredRows,
    pack_rows,
    quantised_bytes,
    unpacked,
)
from medusa_chat.messages import LoadRequest

OUTS, INS = 83, 512
# where a block's numbers of fp16 are, else the first; MXFP4's are bytes
SCALES = {3: (0, 2), 7: (0, 2), 10: (80, 82), 11: (108,), 12: (0, 2), 13: (0, 2), 14: (208,)}
SIZES = {"hidden_size": 256, "intermediate_size": 256}


def stored(kind: int, outs: int = OUTS, ins: int = INS) -> StoredRows:
    """Random rows of a type."""
    _, each, size = TYPES[kind]
    random = np.random.default_rng(kind)
    raw = random.integers(0, 256, (outs * ins // each, size), dtype=np.uint8)
    if kind == 39:
        raw[:, 0] = random.integers(110, 130, len(raw))
    for at in () if kind == 39 else SCALES.get(kind, (0,)):
        halves = random.normal(0, 0.02, (len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    return StoredRows(kind, torch.from_numpy(raw.reshape(outs, -1)), ins)


def folder_of(path):
    """What the file was converted to."""
    return converted_folder(Checkpoint.find(LoadRequest(str(path))), "bf16").backbone


def linear_of(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight.data = weight
    linear.bias.data = linear.bias.data.bfloat16()
    return linear.requires_grad_(False)


def whole_numbers(rows: int, ins: int = INS) -> torch.Tensor:
    """Random inputs that 8 bits hold exactly: whole numbers times a power of two, of which every 32
    reach 127."""
    numbers = torch.randint(-127, 128, (rows, ins // 32, 32)).float()
    numbers[..., 0] = 127
    return (numbers * 2.0 ** torch.randint(-4, 3, (rows, ins // 32, 1))).flatten(1)


def off_by(found: torch.Tensor, x: torch.Tensor, rows: StoredRows, bias: torch.Tensor) -> float:
    """The largest difference from the exact product, as a share of the largest output."""
    exact = x.double() @ rows.values().double().t() + bias.double()
    return float((found - exact).abs().max() / exact.abs().max())


@pytest.fixture(scope="module")
def avx2(library, tmp_path_factory):
    """The library as a CPU without AVX-512 has it."""
    if platform.machine() != "x86_64":
        return library
    file = tmp_path_factory.mktemp("native") / "avx2.so"
    native_build._compile([*native_build.compiler(), "-mno-avx512f"], file)
    return CDLL(str(file))


@pytest.mark.parametrize("cpu", ["library", "avx2"])
@pytest.mark.parametrize("kind", KEPT)
def test_a_linear_multiplies_the_files_own_numbers(kind, cpu, request):
    rows = stored(kind)
    linear = linear_of(rows.values().bfloat16())
    ours = NativeLinear(linear, NativeLibrary(request.getfixturevalue(cpu), 2), rows)
    assert ours.weights.kind == PACKED + kind
    assert torch.equal(torch.cat([*ours.weight_parts()]), rows.values())
    exact, near = whole_numbers(7), torch.randn(64, INS)
    assert off_by(ours(exact), exact, rows, linear.bias) < 1e-6
    whole = ours(near)
    assert off_by(whole, near, rows, linear.bias) < 0.01
    for count in range(1, 64):
        assert torch.equal(ours(near[:count]), whole[:count]), count
        assert torch.equal(ours(near[-count:]), whole[-count:]), count


@pytest.fixture(scope="module")
def portable(tmp_path_factory, library):
    """The library with dot products in portable C."""
    file = tmp_path_factory.mktemp("portable") / "portable.so"
    native_build._compile([*native_build.compiler(), "-DPLAIN_DOT"], file)
    return CDLL(str(file))


def test_this_cpus_instructions_have_the_bits_of_portable_c(portable, library):
    x = torch.randn(15, INS)
    for kind in KEPT:
        rows = stored(kind)
        linear = linear_of(rows.values().bfloat16())
        one, other = (NativeLinear(linear, NativeLibrary(c, 1), rows) for c in (portable, library))
        assert torch.equal(torch.cat([*one.weight_parts()]), rows.values()), kind
        for count in (1, 2, 4, 15):
            assert torch.equal(one(x[:count]), other(x[:count])), (kind, count)


@pytest.mark.parametrize("kind", KEPT)
def test_rows_are_packed_piece_by_piece_and_read_in_any_order(kind, library):
    rows, threads = stored(kind), NativeLibrary(library, 2)
    weights, panels = pack_rows([rows], OUTS, threads)
    parts = [rows.rows(slice(at, end)) for at, end in ((0, 5), (5, 40), (40, OUTS))]
    assert torch.equal(pack_rows(parts, OUTS, threads)[1], panels)
    places = torch.tensor([82, 0, 16, 17, 16, 81])
    assert torch.equal(unpacked(weights, INS, places, threads), rows.values()[places])
    assert panels.nbytes == math.ceil(OUTS / threads.panel_width) * threads.panel_width * (
        INS // 32 * KEPT[kind]
    )
    assert (
        panels.nbytes / math.ceil(OUTS / threads.panel_width) / threads.panel_width
        <= 1.04 * (rows.data.shape[1])
    )


@pytest.mark.parametrize("kind", [2, 3, 6, 7, 8, 20, 39])
def test_inputs_need_not_fill_chunks_of_256(kind, library):
    """SmolLM2 has 576."""
    rows, x = stored(kind, 40, 32 * 11), whole_numbers(3, 32 * 11)
    linear = linear_of(rows.values().bfloat16())
    ours = NativeLinear(linear, NativeLibrary(library, 1), rows)
    assert off_by(ours(x), x, rows, linear.bias) < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cpu", ["library", "avx2"])
def test_a_number_that_is_none_stays_none(bad, cpu, request):
    rows = stored(8)
    threads = NativeLibrary(request.getfixturevalue(cpu), 1)
    x = torch.randn(2, INS)
    x[1, 300] = bad
    found = NativeLinear(linear_of(rows.values().bfloat16()), threads, rows)(x)
    assert found[0].isfinite().all() and not found[1].isfinite().any()


def test_other_weights_than_the_files_are_told_apart():
    """As after a LoRA adapter was merged into them."""
    rows = stored(8)
    weight = rows.values().bfloat16()
    assert rows.stands_for(weight)
    weight[7, 5] += 1
    assert not rows.stands_for(weight)


@pytest.mark.parametrize("kind", [3, 8, 14])
def test_weights_that_c_multiplies_wrongly_are_unpacked(kind, library, monkeypatch, caplog):
    """A planted fault: the last bit of every byte is another."""
    rows = stored(kind)
    linear, threads = linear_of(rows.values().bfloat16()), NativeLibrary(library, 1)

    def faulty(*what):
        weights, panels = pack_rows(*what)
        panels ^= 1
        return weights, panels

    monkeypatch.setattr(native_weights, "pack_rows", faulty)
    ours, x = NativeLinear(linear, threads, rows), torch.randn(3, INS)
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
    ids, off = torch.arange(40), []
    with torch.inference_mode():
        for one in (packed, plain):
            backbone = one.engine.backbone
            exact = reference_logits(backbone, ids)  # in fp32, of what is multiplied
            backbone.cache.crop(0)
            found = backbone.lm_head(backbone.run_chunk(ids))
            off.append(((found - exact).norm(dim=1) / exact.norm(dim=1)).nanmedian())
    assert max(off) < 0.05  # a number of x on the edge is rounded the other way now and then


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
    whole, rows = load_file(tmp_path / "whole.safetensors"), FileRows(weights)
    assert files.kept > 0
    for name, weight in whole.items():
        found = rows.stored(name)
        assert (found is None) == (weight.dim() == 1), name
        if found is not None:
            assert torch.equal(found.values().bfloat16(), weight), name
            changed = weight + 1
            assert rows(name, changed) is changed
            assert isinstance(rows(name, weight), StoredRows)
    assert rows.stored("nothing.weight") is None
