"""NF4 weights as tiles: the code table, how the kernel reads a matrix, and how it decodes one."""

from dataclasses import dataclass

import torch
from torch import Tensor

# the 16 values of a 4-bit NormalFloat (QLoRA, arXiv 2305.14314, appendix E)
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCK = 64  # weights that share a scale
OUTPUTS = 64  # of one tile; it has 2 * BLOCK inputs
BUCKETS = (1, 16, 32, 64)  # rows for which the kernel is tried
LEAST_ROWS = 16  # of a tensor core's product


@dataclass(frozen=True)
class Tiles:
    """The weights [N, K] of a linear as the kernel reads them, tile by tile of 64 outputs and 128
    inputs; what lies beyond N and K has scale 0.

    codes uint8 [N / 64, K / 128, 64, 64]: byte j of a row is its weights j (low half) and 64 + j
    (high half). scales fp32 [N / 64, K / 128, 2, 64]: of those two blocks, for each output.
    """

    codes: Tensor
    scales: Tensor
    outputs: int
    inputs: int


def decoder(dtype: torch.dtype) -> str:
    """For `inline_asm_elementwise` with pack 4: four bytes in $4 -> the numbers of their low
    halves in $0 and $1, of their high halves in $2 and $3. dtype: fp16 or bf16.

    `prmt` picks each byte of its result out of eight by three bits of a 4-bit number, so two of
    them and one that chooses by the fourth bit look up a byte of four weights: 21 instructions for
    eight weights, and no memory is read.
    """
    bits = torch.tensor(TABLE).to(dtype).view(torch.int16).tolist()
    lines = [
        "and.b32 s, $4, 0x77777777",  # which of eight
        "shr.u32 m, $4, 1",
        "and.b32 m, m, 0x44444444",
        "or.b32 m, m, 0x32103210",  # from the lower or the upper eight
    ]
    for low, high in (("$0", "$2"), ("$1", "$3")):
        for name, shift in (("l", 0), ("h", 8)):
            words = _words([(value >> shift) & 0xFF for value in bits])
            lines += [
                f"prmt.b32 a, {words[0]}, {words[1]}, s",
                f"prmt.b32 b, {words[2]}, {words[3]}, s",
                f"prmt.b32 {name}, a, b, m",
            ]
        lines += [f"prmt.b32 {low}, l, h, 0x6240", f"prmt.b32 {high}, l, h, 0x7351"]
        if low == "$0":
            lines += ["shr.u32 s, s, 16", "shr.u32 m, m, 16"]
    body = "\n".join(f"{line};" for line in lines)
    return "{\n.reg .b32 s, m, a, b, l, h;\n" + body + "\n}"


def _words(values: list[int]) -> list[str]:
    """Sixteen bytes as four numbers of 32 bits, the first byte lowest."""
    return [f"0x{int.from_bytes(bytes(values[i : i + 4]), 'little'):08x}" for i in (0, 4, 8, 12)]
