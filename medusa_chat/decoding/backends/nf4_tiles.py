"""NF4 weights as tiles: the code table, and how the kernel reads a matrix."""

from dataclasses import dataclass

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
BUCKETS = (16, 32, 64)  # rows for which the kernel is compiled


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
