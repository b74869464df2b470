"""What a whole step costs on a named GPU: the facts a page may teach from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_chat.training.hardware import GPUS, PRECISIONS, SHAPES, layer_seconds, step_seconds

SEVEN = SHAPES[0]
NAMES = {gpu.name: gpu for gpu in GPUS}
MEASURED = Path(__file__).parents[2] / "assets/benchmarks/gpu-h200.json"


def seconds(gpu: str, precision: str, nodes: int, length: int = 512) -> float:
    return step_seconds(SEVEN, NAMES[gpu], precision, nodes, length)


@pytest.mark.parametrize(("part", "precision"), [("7b-fp16", "fp16"), ("7b-nf4", "4 bit")])
def test_the_steps_of_an_h200_take_what_was_measured(part, precision) -> None:
    runs = json.loads(MEASURED.read_text("utf-8"))["runs"]
    parts = (run["parts"].get(part, {}) for run in runs)
    *_, found = (one["found"] for one in parts if "found" in one)
    for nodes in (1, 16, 32, 64) if precision == "fp16" else (1, 8, 16, 32, 64):
        for length in (1000, 4000):
            ms = found[f"{nodes} nodes behind {length}"]["ms"]
            assert 1e3 * seconds("H200", precision, nodes, length) == pytest.approx(ms, rel=0.06)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_step_is_never_promised_faster_than_the_papers_products(gpu, shape) -> None:
    for nodes in (1, 16, 64):
        paper = shape.layers * layer_seconds(shape, gpu, 1, 512, nodes)
        assert step_seconds(shape, gpu, "fp16", nodes, 512) > paper


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_more_nodes_never_cost_less(gpu, precision) -> None:
    times = [step_seconds(SEVEN, gpu, precision, n, 512) for n in range(1, 257)]
    assert times == sorted(times)


def test_64_rows_take_longer_in_4_bit_than_in_fp16_on_a_fast_card() -> None:
    assert seconds("H100", "4 bit", 64) > seconds("H100", "fp16", 64)
    assert seconds("H100", "4 bit", 16) < seconds("H100", "fp16", 16)
    assert seconds("RTX 4090", "4 bit", 64) < seconds("RTX 4090", "fp16", 64)


def test_64_nodes_in_fp16_cost_little_more_than_a_plain_step() -> None:
    assert 1.1 < seconds("RTX 4090", "fp16", 64) / seconds("RTX 4090", "fp16", 1) < 1.2


def test_it_needs_no_torch() -> None:
    code = "import sys, medusa_chat.training.hardware; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
