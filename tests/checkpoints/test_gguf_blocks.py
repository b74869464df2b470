"""Products with the rows of a GGUF file's own blocks: every type, piece by piece, on any CPU."""

import math
from ctypes import CDLL

import numpy as np
import pytest
import torch

from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.layouts.gguf_header import KEPT, TYPES
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import (
    PACKED,
    NativeLinear,
    StoredRows,
    pack_rows,
    unpacked,
)

OUTS, INS = 83, 512
# where a block's numbers of fp16 are, else the first; MXFP4's are bytes
SCALES = {3: (0, 2), 7: (0, 2), 10: (80, 82), 11: (108,), 12: (0, 2), 13: (0, 2), 14: (208,)}


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
def avx2(tmp_path_factory):
    """The library as a CPU without AVX-512 has it."""
    if "avx512bw" not in native_build._cpu().decode():
        pytest.skip("the library is already what a CPU without AVX-512 has")
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


@pytest.fixture(scope="module", params=[[], ["-DWIDTH=16"]], ids=["as wide", "vectors of 16"])
def portable(request, tmp_path_factory, library):
    """The library with dot products in portable C, in vectors as wide as the CPU's or of 16. It is
    compiled as it stands, which takes a fraction of the time and leaves all bits as they are."""
    file, usual = tmp_path_factory.mktemp("portable") / "portable.so", native_build._flags()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_build, "_flags", lambda: [f for f in usual if f != "-O2"])
        native_build._compile([*native_build.compiler(), "-DPLAIN_DOT", *request.param], file)
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
