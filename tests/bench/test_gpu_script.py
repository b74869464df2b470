"""assets/benchmarks/gpu.py, for a day with a GPU: what of it a CPU can run does run."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from medusa_chat.bench.harness.random_model import RandomModel
from medusa_chat.decoding.fused_layers import FusedLayer
from medusa_chat.decoding.linear4 import is_linear4
from medusa_chat.messages import LoadRequest

FOLDER = Path(__file__).parents[2] / "assets" / "benchmarks"
CPU = torch.device("cpu")
TINY = RandomModel("tiny", 64, 128, 2, 4, 2, 96, 256, heads=3)

pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("gpu_nf4")


@pytest.fixture
def script(parts, monkeypatch):
    """gpu.py on a CPU: its clock is the host's, its models are tiny, and torch runs their parts."""
    monkeypatch.setattr("medusa_chat.checkpoints.native_build.library", lambda: None)
    found = importlib.import_module("gpu")
    monkeypatch.setattr(found, "timed", lambda call: [call() for _ in range(3)] and 1.0)
    monkeypatch.setattr(found, "SMALL", TINY)
    monkeypatch.setattr(found, "PROMPT", [3, 5, 7, 11] * 5)
    monkeypatch.setattr(
        found, "LoadRequest", lambda device, precision: LoadRequest(device="cpu", precision="fp32")
    )
    return found


def test_recorded_steps_are_compared_with_their_parts(script):
    found = script.recorded_parity()
    assert len(found) == 2 * (1 + 3 * 2)
    assert all(value is None for name, value in found.items() if "difference" in name)


def test_recorded_steps_are_timed_against_their_parts(script):
    found = script.step_times(script.load_shape(TINY, LoadRequest(device="cpu")).engine)
    variants = {"by operators", "recorded"}
    for nodes in (1, 8, 16, 32, 64):
        for name in variants:
            assert found[f"{name}, {nodes} nodes"] > 0
            assert found[f"{name}, {nodes} nodes, in an answer"] > 0
        assert found[f"recorded, {nodes} nodes, of the device"] > 0


def test_texts_that_part_are_counted(script, monkeypatch):
    from gpu_divergence import NODES, ROWS, divergence, parted_at

    from medusa_chat.checkpoints import prepare
    from medusa_chat.decoding.backbone import Backbone

    passes, run_tree = {}, Backbone.run_tree

    class Forced(Backbone):
        """As on a CUDA device: what `prepare` leaves out on a CPU is not left out."""

        def __init__(self, *arguments):
            self.asked = int(os.environ[prepare.STEADY])
            passes[self.asked] = set()
            super().__init__(*arguments)

        rows = property(lambda self: self.asked, lambda self, value: None)

    def counted(backbone, tokens, *arguments):
        passes[list(passes)[-1]].add(len(tokens))
        return run_tree(backbone, tokens, *arguments)

    monkeypatch.setenv(prepare.STEADY, "7")
    monkeypatch.setattr("medusa_chat.checkpoints.prepare.Backbone", Forced)
    monkeypatch.setattr(Backbone, "run_tree", counted)
    found = divergence("fp32", "cpu", 4)
    assert list(passes) == list(ROWS) and os.environ[prepare.STEADY] == "7"
    check = 6  # nodes of the check at a load
    assert passes[1] >= {check, *NODES} and passes[64] == {check, 64}
    pairs = (([1, 2], [1, 2], None), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1], 1), ([4], [5], 0))
    assert [parted_at(a, b) for a, b, _ in pairs] == [place for *_, place in pairs]
    for count in ROWS:
        for nodes in (16, 64):
            assert found[f"{count} rows, {nodes} nodes, parted for every 1,000 tokens"] == 0
            assert found[f"{count} rows, {nodes} nodes, tokens compared"] > 20
        assert found[f"{count} rows, 1 nodes, ms a step"] > 0


def test_without_a_gpu_the_script_says_so_in_one_line():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, str(FOLDER / "gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1  # on some CPUs bitsandbytes has something to say first
    assert done.stderr.splitlines()[-1] == "there is no CUDA device here"


def test_merged_and_loaded_4_bit_layers_give_the_same_tokens(parts):
    found = parts.merged_parity(TINY, CPU, torch.float32, 24)
    assert found["merged against loaded"] is None
    assert found["merged, Medusa against plain"] is None
    assert found["check of a tree step"] < 1e-4


def test_steps_are_timed_as_loaded_and_merged_and_the_kernel_is_not_claimed(parts):
    def times(engine):
        layers = engine.backbone.model.model.layers
        kinds = [isinstance(layer, FusedLayer) for layer in layers]
        down = layers[0].down if all(kinds) else layers[0].mlp.down_proj
        assert is_linear4(down)
        return kinds

    found = parts.step_times(TINY, CPU, lambda call: 1.0, times)
    assert found["as loaded"] == [False, False] and found["merged"] == [True, True]
    assert found["our kernel"] == ["no kernel of ours for 4-bit products here"]
    assert "merged, our kernel" not in found


def test_products_are_timed_for_every_linear_and_number_of_rows(parts):
    found = parts.product_times(lambda call: float(len(call())), CPU, {"q": (64, 128)})
    assert [row["bitsandbytes"] for row in found.values()] == [1, 8, 16, 32, 64]
    assert not any("ours" in row for row in found.values())
    assert "q 64 x 128, 16 rows" in found
