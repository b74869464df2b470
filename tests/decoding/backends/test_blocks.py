"""A GGUF file's blocks for a GPU: laid out, unpacked by torch, and multiplied by our CUDA kernel on
a CPU, thread by thread; the kernel compiled for GPUs that are not here."""

import json
import subprocess
import sys
from functools import partial

import gguf
import pytest
import torch
from support.emulation import LIMITS, emulator, places
from support.triton_folder import triton_or_skip

from medusa_chat.decoding.backends import stored_linear
from medusa_chat.decoding.backends.block_tiles import KINDS, BlockTiles
from medusa_chat.decoding.backends.kernels import blocks
from medusa_chat.decoding.backends.kernels.cuda_programs import EIGHTS
from medusa_chat.decoding.backends.parity import share
from medusa_chat.decoding.backends.stored_linear import (
    StoredEmbedding,
    StoredLinear,
    laid_out_rows,
    random_rows,
)

IDS = [kind.name for kind in KINDS.values()]
NAMES = {kind.name: type for type, kind in KINDS.items()}
# number format -> what rounding outputs to it makes of the largest
FORMATS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
# of each card: 8 rows of a type, and of another all 64
COMPILED = {80: ("Q4_K", "Q6_K"), 86: ("Q6_K", "Q5_1"), 89: ("Q8_0", "Q4_K"), 120: ("Q5_K", "Q4_0")}
COMPILED[90] = *(kind.name for kind in KINDS.values()), "Q4_K"
COMPILES = """
import json
from medusa_chat.decoding.backends.block_tiles import KINDS
from medusa_chat.decoding.backends.kernels import blocks, cuda_programs
kinds = {{kind.name: kind for kind in KINDS.values()}}
made = []
for card, names in {compiled}.items():
    for name in names:
        eights = 8 if name == names[-1] else 1
        asked, _ = blocks.geometry(eights, kinds[name], {limits}[card])
        asked |= {{"IS_BF16": int(card in (86, 120)), "IS_WIDE": int(name == "Q6_K")}}
        code = cuda_programs.compiled(blocks.SOURCE, asked, card)
        made.append([card, name, code[:4].decode("latin-1")])
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """blocks.run by the source on a CPU. limit: of a GPU's shared memory; grid: blocks."""
    launcher = emulator(tmp_path_factory.mktemp("emulated"))

    def by_source(weight, x, out, limit=LIMITS[90], grid=3):
        eights = next(count for count in EIGHTS if len(x) <= 8 * count)
        asked, _ = blocks.geometry(eights, weight.kind, limit)
        asked["IS_BF16"] = int(x.dtype == torch.bfloat16)
        asked["IS_WIDE"] = int(out.dtype == torch.float32)
        table = torch.tensor(weight.kind.table).to(x.dtype) if weight.kind.table else None
        units = weight.data.shape[1] // weight.kind.tile
        numbers = len(x), weight.ins, weight.outs, units, out.stride(0)
        launcher(blocks.SOURCE, asked)(grid, *places(weight.data, x, table, out), *numbers)

    return by_source


def rows_of(type, outs, ins, seed=0):
    return random_rows(type, outs, ins, torch.Generator().manual_seed(seed))


def odd(type):
    """A number of inputs that is no whole 256, where the type has such."""
    return 768 if KINDS[type].block == 256 else 2272


@pytest.mark.parametrize("type", KINDS, ids=IDS)
def test_the_twin_unpacks_to_what_gguf_does_to_the_bit(type):
    for outs, ins in ((48, 512), (37, odd(type)), (3, 256)):
        rows = rows_of(type, outs, ins)
        expected = torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType(type)))
        tiles = BlockTiles.of(type, rows, ins)
        assert tiles.values().equal(expected)
        chosen = torch.tensor([2, outs - 1, 0, 2])
        assert tiles.rows(chosen).equal(expected[chosen])
        if outs > 16:
            assert tiles.values(16, 30).equal(expected[16:30])


@pytest.mark.parametrize("type", KINDS, ids=IDS)
def test_tiles_hold_as_many_bytes_as_the_file(type):
    ins = 768 if KINDS[type].block == 256 else 832
    rows = rows_of(type, 64, ins)
    assert BlockTiles.of(type, rows, ins).data.numel() == rows.numel()


@pytest.mark.parametrize("type", KINDS, ids=IDS)
def test_a_weight_read_in_pieces_is_the_same(type):
    rows = rows_of(type, 75, 512)
    pieces = [rows[:5], rows[5:40], rows[40:]]
    made = laid_out_rows(type, pieces, 512, torch.device("cpu"))
    assert made.outs == 75 and made.data.equal(BlockTiles.of(type, rows, 512).data)


@pytest.mark.parametrize(
    ("type", "dtype"),
    [
        *((type, torch.float16) for type in KINDS),
        *((NAMES[name], torch.bfloat16) for name in ("Q8_0", "Q5_K", "Q6_K", "IQ4_XS")),
    ],
)
def test_the_kernel_gives_what_its_twin_gives(run, type, dtype):
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    compare = partial(stored_linear.off, run, generator, cpu, dtype, type)
    for rows, outs, ins in ((1, 40, 512), (3, 16, odd(type)), (16, 37, 256), (64, 40, 512)):
        assert compare(rows, outs, ins) < FORMATS[dtype], (rows, outs, ins)
    if dtype == torch.float16:  # whole numbers, sums in fp32: no rounding of a weight
        assert compare(8, 24, odd(type), is_wide=True) < 1e-5
        assert compare(33, 40, 512, is_wide=True) < 1e-5


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_row_has_the_same_bits_in_any_company(run, name):
    """Also on a card with less shared memory, where a block has fewer outputs, and whatever blocks
    there are."""
    type = NAMES[name]
    weight = BlockTiles.of(type, rows_of(type, 72, 2304), 2304)
    x = torch.randn(64, 2304, generator=torch.Generator().manual_seed(1)).half()

    def product(rows, limit, grid):
        out = torch.empty(rows, 72)
        run(weight, x[:rows], out, limit, grid)
        return out

    whole = product(64, LIMITS[90], 3)
    for rows, limit, grid in ((1, LIMITS[90], 1), (9, LIMITS[90], 7), (32, LIMITS[86], 2)):
        assert product(rows, limit, grid).equal(whole[:rows])


def test_a_block_fits_into_the_shared_memory_of_every_card():
    for most in LIMITS.values():
        for kind in KINDS.values():
            for eights in EIGHTS:
                asked, ring = blocks.geometry(eights, kind, most)
                whole = blocks.whole_shared(asked["TILES"], kind)
                assert ring < whole <= most and whole * asked["RESIDENT"] <= most
    assert blocks.geometry(8, KINDS[NAMES["Q6_K"]], LIMITS[86])[0]["TILES"] == 1
    assert blocks.geometry(8, KINDS[NAMES["Q4_K"]], LIMITS[90])[0]["TILES"] == 2


def test_it_is_compiled_for_every_card():
    environment = triton_or_skip(needs="cuda")
    code = COMPILES.format(limits=LIMITS, compiled=COMPILED)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout)
    assert {card for card, *_ in made} == set(LIMITS)
    assert {name for _, name, _ in made} == set(IDS)
    assert all(magic == "\x7fELF" for *_, magic in made)


def stored(dtype, *names, outs=48, ins=512, bias=False):
    parts = [BlockTiles.of(NAMES[n], rows_of(NAMES[n], outs, ins, seed=i), ins)
             for i, n in enumerate(names)]  # fmt: skip
    return StoredLinear(parts, torch.ones(outs * len(names), dtype=dtype) if bias else None, dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_keep_a_type_of_their_own(run, monkeypatch, bias):
    q, k, v = (stored(torch.float16, n, bias=bias) for n in ("Q4_K", "Q4_K", "Q6_K"))
    merged = StoredLinear.joined([q, k, v])
    assert [part.type for part in merged.parts] == [NAMES["Q4_K"], NAMES["Q6_K"]]
    assert merged.sizes == [96, 48]
    x = torch.randn(1, 5, 512, generator=torch.Generator().manual_seed(0)).half()
    apart = torch.cat([one(x) for one in (q, k, v)], -1)
    assert merged(x).equal(apart)  # by torch
    monkeypatch.setattr(blocks, "run", run)
    merged.is_own = True
    assert share(merged(x), apart) < 2e-3  # whose weights are rounded to 16 bits
    wide = merged.widened(x)
    assert wide.dtype == torch.float32 and share(wide.half(), merged(x)) < 1e-3
    many = torch.randn(70, 512).half()  # more than the kernel takes
    assert merged(many).equal(torch.cat([one(many) for one in (q, k, v)], -1))


def test_a_part_in_16_bits_lies_beside_blocks():
    linear = stored(torch.bfloat16, "Q5_0")
    weight = torch.randn(32, 512).bfloat16()
    both = StoredLinear.joined([linear, StoredLinear([weight], None, torch.bfloat16)])
    x = torch.randn(3, 512).bfloat16()
    assert both(x).equal(torch.cat([linear(x), x @ weight.T], 1))
    chosen = torch.tensor([70, 0, 48])
    assert both.rows(chosen)[[0, 2]].equal(weight[[22, 0]])


@pytest.mark.parametrize("name", IDS)
def test_an_embedding_is_unpacked_row_by_row(name):
    rows = rows_of(NAMES[name], 60, 256)
    table = BlockTiles.of(NAMES[name], rows, 256)
    ids = torch.tensor([[59, 3, 3]])
    found = StoredEmbedding(table, torch.bfloat16, torch.tensor(2.0))(ids)
    assert found.equal(2 * table.values()[ids].bfloat16())


def test_without_a_gpu_blocks_are_unpacked_and_that_is_said():
    model = torch.nn.Sequential(stored(torch.float16, "Q4_K"), stored(torch.float16, "Q6_K"))
    notes = stored_linear.use_kernels(model)
    assert len(notes) == 2 and all("unpacked in every step" in note for note in notes)
    assert not any(linear.is_own for linear in model)


def test_the_kernel_is_used_where_it_agrees(run, monkeypatch):
    """The check of a load, with the source on a CPU in the place of the card."""

    def off() -> float:
        return stored_linear.difference(torch.device("cpu"), torch.float16, NAMES["Q8_0"])

    def wrong(weight, x, out):
        out.copy_(1.5 * x.float() @ weight.values().T)

    monkeypatch.setattr(blocks, "run", run)
    assert off() < stored_linear.TOLERANCE
    monkeypatch.setattr(blocks, "run", wrong)
    assert off() >= stored_linear.TOLERANCE
