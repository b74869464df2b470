"""What a whole step costs on a named GPU: the facts a page may teach from it."""

import subprocess
import sys

import pytest

from medusa_chat.training.gpu_step import PRECISIONS, step_time
from medusa_chat.training.hardware import GPUS, SHAPES, layer_seconds

SEVEN = SHAPES[0]
NAMES = {gpu.name: gpu for gpu in GPUS}


def seconds(gpu: str, precision: str, nodes: int, shape=SEVEN) -> float:
    return step_time(shape, NAMES[gpu], precision, nodes, 512).seconds


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_step_is_never_promised_faster_than_the_papers_products(gpu, shape) -> None:
    for nodes in (1, 16, 64):
        paper = shape.layers * layer_seconds(shape, gpu, 1, 512, nodes)
        assert step_time(shape, gpu, "fp16", nodes, 512).seconds > paper


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_more_nodes_never_cost_less(gpu, precision) -> None:
    times = [step_time(SEVEN, gpu, precision, n, 512).seconds for n in range(1, 257)]
    assert times == sorted(times)


def test_4_bit_pays_for_its_unpacking_at_64_rows() -> None:
    # writing all weights out costs 4 to 5 plain steps on an H100
    assert 4 < seconds("H100", "4 bit", 64) / seconds("H100", "4 bit", 1) < 6
    assert seconds("H100", "4 bit", 64) > seconds("H100", "fp16", 64)
    assert seconds("H100", "4 bit", 4) < seconds("H100", "fp16", 4)


def test_only_o_falls_back_on_a_4090() -> None:
    few, many = (step_time(SEVEN, NAMES["RTX 4090"], "4 bit", n, 512) for n in (8, 64))
    assert few.unpacking == 0 < many.unpacking
    assert many.seconds < seconds("H100", "4 bit", 64) * 1.2


def test_64_nodes_in_fp16_cost_little_more_than_a_plain_step() -> None:
    assert 1.1 < seconds("RTX 4090", "fp16", 64) / seconds("RTX 4090", "fp16", 1) < 1.2


def test_plain_decoding_runs_no_heads() -> None:
    assert step_time(SEVEN, NAMES["H100"], "fp16", 1, 512).heads == 0
    assert step_time(SEVEN, NAMES["H100"], "fp16", 2, 512).heads > 0


def test_it_needs_no_torch() -> None:
    code = "import sys, medusa_chat.training.gpu_step; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
