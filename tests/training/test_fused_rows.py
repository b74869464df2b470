"""What bitsandbytes' own rule says of each GPU, asked here without a GPU: few rows of a 7B's o and
down read packed weights, which is why we have a product of our own."""

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from medusa_chat.training.hardware import SHAPES, ModelShape

# The most rows whose products read packed weights, by (q, k, v), o, (up, gate) and down, for 7B,
# 13B and 33B. Where more rows read them again behind a gap, those are left out (A100, 8 to 16 rows
# of a 7B's down).
AMPERE = ((128, 64, 128, 64), (128, 64, 128, 64), (128, 128, 128, 128))
HOPPER = ((32, 7, 48, 5), (32, 5, 64, 5), (48, 16, 64, 16))
FUSED_ROWS = {
    **dict.fromkeys(("RTX 3090", "A40", "A6000"), AMPERE),
    "RTX 4090": ((64, 8, 128, 64), (128, 8, 256, 64), (128, 128, 256, 128)),
    "RTX 5090": ((64, 8, 128, 8), (64, 8, 128, 16), (64, 8, 256, 8)),
    "A100-80GB-PCIe": ((64, 5, 128, 5), (64, 16, 128, 5), (64, 16, 128, 16)),
    **dict.fromkeys(("H100", "H200"), HOPPER),
}

# multiprocessors and compute capability, from the vendor's data sheets
CARDS = {
    **{"RTX 3090": (82, 8, 6), "A40": (84, 8, 6), "A6000": (84, 8, 6), "RTX 4090": (128, 8, 9)},
    **{"RTX 5090": (170, 12, 0), "A100-80GB-PCIe": (108, 8, 0), "H100": (132, 9, 0)},
    **{"H200": (132, 9, 0)},
}
RULE, FLOOR = "_gemm_4bit_use_custom_cuda", "_GEMM_4BIT_CUSTOM_FLOOR_M"
MOST = 512  # rows; a step has fewer


def rule_of(card: tuple[int, int, int]) -> Callable[..., bool]:
    """bitsandbytes' rule on such a card, taken out of its module: that one cannot be imported with
    a torch that was built without CUDA."""
    found = find_spec("bitsandbytes")
    assert found and found.origin
    module = ast.parse((Path(found.origin).parent / "backends/cuda/ops.py").read_text("utf-8"))
    parts: list[ast.stmt] = []
    for part in module.body:
        if isinstance(part, ast.FunctionDef) and part.name == RULE:
            part.decorator_list.clear()  # its cache would remember another card
            parts.append(part)
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == FLOOR:
            parts.append(part)
    assert len(parts) == 2, "bitsandbytes decides elsewhere now: read its rule and the table again"
    names = {"torch": torch, "_gpu_dispatch_props": lambda device: card}
    exec(compile(ast.Module(parts, []), found.origin, "exec"), names)
    return names[RULE]


def fused_rows(rule: Callable[..., bool], inputs: int, outputs: int) -> int:
    """The most rows of a product up to which it reads packed weights."""
    fused = [rule(0, torch.float16, rows, outputs, inputs) for rows in range(1, MOST + 1)]
    return [*fused, False].index(False)


def linears(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of a layer's products: q, k, v in one; o; up and gate in one; down."""
    hidden, inner = shape.hidden, shape.inner
    return (hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)


def table_of(card: tuple[int, int, int]) -> tuple[tuple[int, ...], ...]:
    rule = rule_of(card)
    return tuple(tuple(fused_rows(rule, *sizes) for sizes in linears(shape)) for shape in SHAPES)


@pytest.mark.parametrize("name", FUSED_ROWS)
def test_the_table_is_what_bitsandbytes_decides(name):
    assert table_of(CARDS[name]) == FUSED_ROWS[name]


def test_another_card_is_seen():
    assert table_of(CARDS["RTX 4090"]) != FUSED_ROWS["RTX 3090"]
