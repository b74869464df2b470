"""Products with quantised weights: our CUDA kernel on a CPU, thread by thread, against its torch
reference; and compiled for GPUs that are not here."""

import json
import subprocess
import sys
from itertools import product

import pytest
import torch
from support.emulation import LIMITS, emulator, places
from support.triton_folder import triton_or_skip

from medusa_chat.decoding.backends import quantised
from medusa_chat.decoding.backends.kernels import products
from medusa_chat.decoding.backends.kernels.cuda_programs import EIGHTS, MachineCode

FORMATS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # and what their rounding makes
COMPILES = """
import json
from itertools import product
from medusa_chat.decoding.backends.kernels import cuda_programs, products
limits = {limits}
made = []
kinds = list(product((4, 8), cuda_programs.EIGHTS, (0, 1)))
for (card, most), (bits, eights, is_bf16) in product(limits.items(), kinds):
    if is_bf16 and card != 90:
        continue
    asked, _ = products.geometry(eights, bits, most)
    asked["IS_BF16"] = is_bf16
    code = cuda_programs.compiled(products.SOURCE, asked, card)
    made.append([card, code[:4].decode("latin-1"), len(code)])
try:
    cuda_programs.compiled(products.SOURCE, {{"BITS": 4, "IS_BF16": 0}}, 90)
except RuntimeError as error:
    made.append(str(error))
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """products.run by the source on a CPU. limit: of a GPU's shared memory; grid: blocks."""
    launcher = emulator(tmp_path_factory.mktemp("emulated"))

    def by_source(codes, scales, x, bits, limit=LIMITS[90], grid=3):
        rows, inputs = x.shape
        outputs = codes.numel() * 8 // (bits * inputs)
        eights = next(count for count in EIGHTS if rows <= 8 * count)
        asked, _ = products.geometry(eights, bits, limit)
        asked["IS_BF16"] = int(x.dtype == torch.bfloat16)
        out = torch.full((rows, outputs), torch.nan, dtype=x.dtype)
        table = torch.tensor(products.TABLE).to(x.dtype)
        given = *places(codes, scales, x, table, out), rows, outputs, inputs // 64
        launcher(products.SOURCE, asked)(grid, *given)
        return out

    return by_source


@pytest.mark.parametrize(("bits", "dtype"), list(product((4, 8), FORMATS)))
def test_the_kernel_gives_what_its_reference_gives(run, bits, dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 64, 64), (8, 96, 320), (16, 200, 1088), (33, 40, 576), (64, 72, 128)]
    for size in sizes:
        off = quantised.off(run, generator, *size, dtype, bits)
        assert off < FORMATS[dtype], (size, off)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_in_any_company(run, bits):
    """Also on a card with less shared memory, where a block has fewer outputs, and whatever blocks
    there are."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-128, 128, (72, 576 * bits // 8), generator=generator).to(torch.int8)
    codes, scales = codes.view(torch.uint8), torch.rand(72 * 9, generator=generator)
    x = torch.randn(64, 576, generator=generator).half()
    whole = run(codes, scales, x, bits)
    for rows, limit, grid in ((1, LIMITS[90], 1), (9, LIMITS[90], 7), (32, LIMITS[86], 2)):
        assert run(codes, scales, x[:rows], bits, limit, grid).equal(whole[:rows])


def test_a_block_fits_into_the_shared_memory_of_every_card():
    for card, bits, eights in product(LIMITS, (4, 8), EIGHTS):
        asked, ring = products.geometry(eights, bits, LIMITS[card])
        whole, of_ring = products._shared(asked["TILES"], bits)
        assert ring == of_ring < whole <= LIMITS[card]
    assert products.geometry(8, 4, LIMITS[86])[0]["TILES"] == 1
    assert products.geometry(8, 4, LIMITS[90])[0]["TILES"] == 2


def test_it_is_compiled_for_every_card():
    environment = triton_or_skip(needs="cuda")
    command = [sys.executable, "-c", COMPILES.format(limits=LIMITS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    *made, fault = json.loads(done.stdout)
    assert {card for card, *_ in made} == set(LIMITS)
    assert all(magic == "\x7fELF" for _, magic, _ in made)
    assert 'identifier "TILES" is undefined' in fault


def test_machine_code_is_kept_where_a_folder_is_known(tmp_path):
    kept = MachineCode()
    kept.put("one.cubin", b"\x7fELF1")
    assert kept.get("one.cubin") is None
    kept.folder = tmp_path / "kernels"
    assert kept.get("one.cubin") is None
    kept.put("one.cubin", b"\x7fELF1")
    assert kept.get("one.cubin") == b"\x7fELF1"
    (kept.folder / "one.cubin").write_bytes(b"cut")
    assert kept.get("one.cubin") is None  # compiled anew
    kept.folder = tmp_path / "file"
    kept.folder.write_bytes(b"")
    kept.put("one.cubin", b"\x7fELF1")  # a disk that cannot be written only costs time
