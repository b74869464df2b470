"""assets/benchmarks/gpu.py, for a day with a GPU: its parts run on a CPU, and its runner does."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from medusa_chat.messages import LoadRequest

FOLDER = Path(__file__).parents[2] / "assets" / "benchmarks"
CPU = torch.device("cpu")
MISSING = ("bitsandbytes", "platformdirs", "gradio", "pydantic", "segno")  # on such a machine
# All parts one after another in one process, which imports torch once.
EVERY_PART = f"""
import json, sys
from pathlib import Path
sys.modules.update(dict.fromkeys({MISSING}))  # an import of any of them fails
sys.path[:0] = [{str(FOLDER)!r}, {str(FOLDER.parents[1])!r}]
import gpu, gpu_part
known, into, out = (Path(name) for name in sys.argv[1:])
found = {{}}
fields = {{"device": "cpu", "is_dry": True, "model": None}}
for part in gpu.PARTS:
    gpu_part.written(known, {{name: one.get("found", {{}}) for name, one in found.items()}})
    into.unlink(missing_ok=True)
    gpu_part.run(json.dumps([part.call, fields, part.options, part.needs]), known, into)
    found[part.name] = json.loads(into.read_text())
out.write_text(json.dumps(found))
"""


@pytest.fixture(scope="module", autouse=True)
def folder_on_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """What every part finds on a CPU, without the packages that a GPU machine may lack."""
    folder = tmp_path_factory.mktemp("dry")
    files = [str(folder / name) for name in ("known", "into", "out")]
    without = {"MEDUSA_CHAT_NATIVE": "0", "CXX": "no-compiler", "KINETO_LOG_LEVEL": "99"}
    command = [sys.executable, "-c", EVERY_PART, *files]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | without)
    assert done.returncode == 0, done.stderr
    return json.loads(Path(files[-1]).read_text())


def test_every_part_runs_to_its_end_without_packages_that_may_be_missing(dry_run):
    import gpu

    outcomes = {name: one.get("outcome") for name, one in dry_run.items()}
    assert list(outcomes) == [part.name for part in gpu.PARTS]
    needing = {part.name for part in gpu.PARTS if part.needs}
    assert {outcomes.pop(name) for name in needing} == {"left out: bitsandbytes is not installed"}
    assert outcomes.pop("generate-compiled").startswith("left out: torch.compile needs")
    for name in (gpu.MODEL, gpu.EXACT):
        assert outcomes.pop(name) == "left out: give a small model as --model"
    assert set(outcomes.values()) == {None}
    assert all(dry_run[name]["found"] for name in outcomes)


def test_steps_are_timed_profiled_and_compared_with_plain_ones(dry_run):
    sizes = (1, 16, 32, 64)
    for part, lengths in (("7b-fp16", (1000, 4000)), ("8b-bf16", (8000, 32000))):
        found = dry_run[part]["found"]
        assert found["steps run by"] == "one CUDA graph, queued ahead"
        for length in lengths:
            steps = {nodes: found[f"{nodes} nodes behind {length}"] for nodes in sizes}
            for nodes, one in steps.items():
                assert one["ms"] > 0 and one["overhead"] == one["ms"] / steps[1]["ms"]
                assert one["profile"]["kernels, ms"] > 0 and one["profile"]["products, ms"] > 0
                assert ("share of bandwidth" in one) == (nodes == 1)
            assert (
                0 < steps[1]["share of bandwidth"] < steps[1]["share of bandwidth, with the cache"]
            )
            modelled = [one["speedup over plain, modelled"] for one in steps.values()]
            assert modelled[0] == 1 and all(value > 0 for value in modelled)
    assert "drafts are taken from the shortlist" in dry_run["7b-shortlist"]["found"]


def test_the_heads_of_the_shapes_have_lm_heads_of_their_own():
    import gpu_steps
    from gpu_part import Bench

    for bench in (Bench("cuda"), Bench("cpu", is_dry=True)):
        shape = gpu_steps.shape_of(bench, "7b", 5000)
        assert shape.own_lm and shape.context == 5000
    assert gpu_steps.shape_of(Bench("cuda"), "8b", 33000).vocabulary == 128256
    heads = gpu_steps.load_shape(gpu_steps.TINY, LoadRequest(device="cpu")).engine.heads
    assert heads.lm_weight.shape == (5, 96, 64) and float(heads.lm_weight.std()) > 0.01


def test_generate_stands_beside_our_steps(dry_run):
    found = dry_run["generate"]["found"]
    assert found["ms a token"] > 0 and found["our plain decoding, times as fast"] > 0
    assert found["our Medusa, 64 nodes, acceptance modelled, times as fast"] > 0


def test_recorded_steps_are_compared_with_their_parts(dry_run):
    found = dry_run["recorded"]["found"]
    assert len(found) == 3 * (1 + 3 * 2)
    assert all(value is None for name, value in found.items() if "difference" in name)


def test_texts_that_part_are_counted(dry_run):
    found = dry_run["exactness-demo"]["found"]
    assert found["nf4"] == "left out: bitsandbytes is not installed"
    for precision in ("fp16", "bf16", "fp32"):
        assert found[f"{precision}, plain, ms a step"] > 0
        for nodes in (16, 64):
            one = found[f"{precision}, {nodes} nodes"]
            assert one["parted"] == [] and one["tokens compared"] > 20
            assert one["tokens a step"] > 1 and one["ms a step"] > 0


def test_every_backend_is_tried_with_every_mask_and_keys(dry_run):
    found = dry_run["attention-probe"]["found"]
    assert len(found) == 4 * 2 * 2
    done = [one for name, one in found.items() if name.startswith("math")]
    assert all(one["outcome"] == "done" and one["off by"] < 1e-2 for one in done)
    assert all(len(one["ms of new lengths"]) == 5 for one in done)
    assert all(one["outcome"] == "done" or "refused" in one["outcome"] for one in found.values())


def test_an_attempt_that_faults_leaves_the_next_ones():
    from gpu_attention import _alone

    assert _alone(_shot) == {"outcome": "killed by SIGKILL"}
    assert _alone(dict) == {}


def _shot():
    os.kill(os.getpid(), 9)


def test_kernels_are_named_by_what_they_do():
    from gpu_profile import kind_of

    assert kind_of("nvjet_tst_64x8_64x16_4x1_v_bz_TNT") == "products"
    assert kind_of("void cublasLt::splitKreduce_kernel<32, 16>") == "products"
    assert kind_of("product") == "products"
    assert kind_of("fmha_cutlassF_f16_aligned_64x128_rf_sm80") == "attention"
    assert kind_of("_split_kernel") == "attention"
    assert kind_of("Memcpy DtoH (Device -> Pinned)") == "copies"
    assert kind_of("void at::native::cunn_SoftMaxForward") == "other"


def test_the_script_writes_the_parts_that_were_asked_for(tmp_path):
    out = tmp_path / "gpu.json"
    asked = ["--dry-run", "--parts", "ceiling", "--out", str(out)]
    done = subprocess.run([sys.executable, FOLDER / "gpu.py", *asked], stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert list(report["parts"]) == ["machine", "ceiling"] and report["is_dry"]
    assert report["parts"]["machine"]["found"]["torch"] == torch.__version__
    assert report["parts"]["ceiling"]["found"]["GB/s"] > 0


def test_a_part_that_needs_a_folder_is_run_where_one_is_given_or_it_is_asked_for():
    import gpu

    def names(*asked):
        return [part.name for part in gpu.chosen(*asked)]

    assert len(names(None, None)) == len(gpu.PARTS) - 2
    assert not {gpu.MODEL, gpu.EXACT} & {*names(None, None)}
    assert {gpu.MODEL, gpu.EXACT} <= {*names(None, "folder")}
    assert names(gpu.EXACT, None) == ["machine", gpu.EXACT]


def test_an_unknown_part_is_refused_in_one_line(tmp_path, monkeypatch):
    import gpu

    asked = ["--parts", "ceilings", "--out", str(tmp_path / "gpu.json")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *asked])
    with pytest.raises(SystemExit, match="^there is no part 'ceilings': see --help$"):
        gpu.main()
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_script_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    import gpu

    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit, match="^there is no CUDA device here$"):
        gpu.main()


@pytest.fixture
def quantised(monkeypatch):
    """gpu_nf4.py, whose models torch runs as on a GPU."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("medusa_chat.checkpoints.native_build.library", lambda: None)
    return importlib.import_module("gpu_nf4")


@pytest.fixture
def bench():
    from gpu_part import Bench

    return Bench("cpu", is_dry=True)


def test_merged_and_loaded_4_bit_layers_give_the_same_tokens(quantised, bench):
    found = dict(quantised.merged(bench))
    assert found["fp32"]["merged against loaded"] is None
    assert found["fp32"]["merged, Medusa against plain"] is None
    assert found["fp32"]["check of a tree step"] < 1e-4
    assert set(found) == {"fp32", "fp16"}


@pytest.mark.parametrize("bits", [4, 8])
def test_steps_of_4_and_8_bits_are_timed_as_a_load_prepares_them(quantised, bench, bits):
    found = dict(quantised.steps(bench, [1000], bits))
    merged = [note for note in found["notes"] if "merged" in note]
    assert len(merged) == 1
    assert not any("-bit product" in note for note in found["notes"])  # not claimed on a CPU
    for nodes in (sizes := (1, 8, 16, 32, 64)):
        assert found[f"{nodes} nodes behind 1000"]["ms"] > 0
    assert len([name for name in found if "nodes behind" in name]) == len(sizes)
    linear = quantised.random_linear(64, 128, CPU, torch.float16, bits)
    assert type(linear).__name__ == {4: "Linear4bit", 8: "Linear8bitLt"}[bits]


def test_products_are_timed_for_every_linear_and_number_of_rows(quantised, bench):
    found = dict(quantised.product_times(bench))
    assert list(found)[:5] == [f"q, {rows} rows" for rows in (1, 8, 16, 32, 64)]
    assert all(min(row.values()) > 0 and len(row) == 3 for row in found.values())
    assert not any("ours" in row for row in found.values())
