"""The trial of our kernels at a load: what agrees and is faster is used, and a lost device is
remembered. There is no GPU here: kernels are their torch references, and clocks are scripted."""

import json
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.engines import decode, engine_of, on
from support.families import tiny

from medusa_chat import paths
from medusa_chat.checkpoints import kernel_trial
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.backends import fused_kernels, quantised, split_attention
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.backends.parity import agrees
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.trees.shapes import cartesian

KERNELS = "medusa_chat.decoding.backends.kernels.split"
NAMES = fused_kernels.NAMES


@pytest.fixture
def kernel(monkeypatch):
    """The split kernel as its reference -> the numbers of keys it was called for."""
    keys = []

    def run(query, key, value, words, scaling):
        keys.append(int(words[0, 1]) + len(words))
        return split_attention.reference(query, key, value, words, scaling)

    monkeypatch.setitem(sys.modules, KERNELS, SimpleNamespace(run=run))
    monkeypatch.setattr(split_attention, "has_kernel", lambda *asked: True)
    monkeypatch.setattr(quantised, "has_kernel", lambda *asked: True)
    return keys


def clock(monkeypatch, keys, gains):
    """Seconds of a call: 1 by torch, 1 / gain by the kernel, by the keys that it reads."""

    def seconds(call):
        before = len(keys)
        call()
        return 1.0 if len(keys) == before else 1 / gains[min(keys[-1], 512) == 512]

    monkeypatch.setattr(kernel_trial, "cuda_seconds", seconds)
    monkeypatch.setattr(split_attention, "SHORT", 64)


def marks():
    return sorted((paths.state_dir() / "kernels").glob("*"))


@pytest.mark.parametrize(
    ("short", "long", "is_used"),
    [(1.0, 1.5, True), (0.9, 1.5, False), (1.0, 1.01, False), (1.0, float("nan"), False)],
)
def test_attention_in_splits_is_used_where_it_wins_and_loses_nothing(
    monkeypatch, kernel, short, long, is_used
):
    engine, tree = engine_of(tiny("llama", hidden_size=64), context=600), cartesian(3, 2)
    wanted = decode(engine, tree=tree)[-1].token_ids
    clock(monkeypatch, kernel, (short, long))
    notes = kernel_trial.try_kernels(engine.backbone)
    assert len(notes) == is_used and all("split attention" in note for note in notes)
    assert (engine.backbone.implementation == split_attention.NAME) is is_used
    kernel.clear()
    engine.forget()
    assert decode(engine, tree=tree)[-1].token_ids == wanted
    assert bool(kernel) is is_used and marks() == []


def test_a_kernel_that_decodes_a_tree_otherwise_is_not_used(monkeypatch, kernel):
    engine = engine_of(tiny("llama", hidden_size=64), context=600)
    clock(monkeypatch, kernel, (1, 2))
    wrong = SimpleNamespace(run=lambda q, k, v, m, s: kernel.append(512) or 2 * q.transpose(1, 2))
    monkeypatch.setitem(sys.modules, KERNELS, wrong)
    assert kernel_trial.try_kernels(engine.backbone) == []
    assert engine.backbone.implementation == "medusa_tree"
    check_steps(engine.backbone)


def test_another_attention_than_ours_is_kept(monkeypatch, kernel):
    backbone = engine_of(tiny("llama", hidden_size=64), "eager", context=600).backbone
    clock(monkeypatch, kernel, (9, 9))
    before = backbone.implementation
    assert kernel_trial.try_kernels(backbone) == [] and backbone.implementation == before


def test_a_kernel_that_lost_the_device_is_not_tried_again_there(monkeypatch):
    backbone = engine_of(tiny("llama")).backbone

    def lose(backbone, timer):
        raise torch.AcceleratorError("CUDA error: misaligned address")

    monkeypatch.setattr(kernel_trial, "_quantised_product", lose)
    monkeypatch.setattr(split_attention, "use_where_faster", lambda *asked: ["tried"])
    with pytest.raises(torch.AcceleratorError):
        kernel_trial.try_kernels(backbone)
    (mark,) = marks()
    off, other = kernel_trial.try_kernels(backbone)  # in the worker that was started again
    assert "quantised-product is not used" in off and str(mark) in off and other == "tried"
    monkeypatch.setattr(kernel_trial, "describe_device", lambda device: "another card")
    monkeypatch.setattr(kernel_trial, "_quantised_product", lambda *asked: ["tried"])
    assert kernel_trial.try_kernels(backbone) == ["tried", "tried"] and marks() == []


def test_a_trial_that_runs_in_another_process_hinders_none(monkeypatch):
    """Two programs that load at once; once the other is gone, its mark tells of a lost device."""
    backbone = engine_of(tiny("llama")).backbone
    monkeypatch.setattr(kernel_trial, "_quantised_product", lambda *asked: ["tried"])
    mark = paths.state_dir() / "kernels" / "quantised-product.json"
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    left = {"device": kernel_trial.describe_device(backbone.device), "torch": torch.__version__}
    left |= {"pid": other.pid, "started": psutil.Process(other.pid).create_time()}
    for is_over in (False, True):
        paths.write_text(mark, json.dumps(left))
        assert ("tried" in kernel_trial.try_kernels(backbone)) is not is_over
        assert marks() == [mark] * is_over
        other.kill()
        other.wait()


def wide_product(monkeypatch, factor=1.0):
    """The LM head's product with fp32 sums, as a CPU has it, times `factor` -> its row counts."""
    rows = []

    def widened(self, hidden):
        rows.append(len(hidden))
        return factor * torch.nn.functional.linear(hidden.float(), self.linear.weight.float())

    monkeypatch.setattr(LogitHead, "widened", widened)
    return rows


@pytest.mark.parametrize(
    ("dtype", "factor", "gain", "is_used"),
    [
        (torch.float16, 1.0, 1.0, True),
        (torch.bfloat16, 1.0, 1.0, True),
        (torch.bfloat16, 1.0, 0.8, False),
        (torch.float16, 1.01, 1.0, False),
        (torch.float16, float("nan"), 1.0, False),
        (torch.float32, 1.0, 1.0, False),
    ],
)
def test_logits_are_fp32_where_the_product_can_give_them(monkeypatch, dtype, factor, gain, is_used):
    """The first of 16 bits; rows of more than a step keep them."""
    engine = engine_of(tiny("llama").to(dtype))
    head, hidden = engine.backbone.lm_head, torch.randn(300, 32).to(dtype)
    with torch.inference_mode():
        narrow = head(hidden[:16])
    rows = wide_product(monkeypatch, factor)

    def clock(call):
        before = len(rows)
        call()
        return 1.0 if len(rows) == before else 1 / gain

    monkeypatch.setattr(kernel_trial, "cuda_seconds", clock)
    notes = kernel_trial.try_kernels(engine.backbone)
    assert any("logits kept in fp32" in note for note in notes) is is_used is head.is_wide
    with torch.inference_mode():
        found = head(hidden[:16])
        assert found.dtype == (torch.float32 if is_used else dtype)
        assert torch.allclose(found.float(), narrow.float(), atol=3e-2)
        assert head(hidden).dtype == dtype
        assert decode(engine, tree=cartesian(3, 2))[-1].token_ids
    assert head(hidden[:16].requires_grad_()).grad_fn is not None


def test_a_product_that_keeps_no_sums_leaves_16_bits(caplog):
    """Torch's own on a CPU, and of older versions."""
    backbone = engine_of(tiny("llama").half()).backbone
    assert kernel_trial._wide_logits(backbone, lambda call: 1.0) == []
    assert not backbone.lm_head.is_wide and "stay in 16 bits" in caplog.text


@pytest.fixture
def twins(monkeypatch):
    """The kernels of a layer and of logits as torch's operators -> how often each was called."""
    calls = Counter()

    def kernel(name):
        def call(*given):
            calls[name] += 1
            return fused_kernels.reference(name)(*given)

        return call

    monkeypatch.setattr(fused_kernels, "kernel", kernel)
    return calls


def merged():
    model = tiny("llama")
    replace_submodules(model)
    return engine_of(model)


def by_calls(monkeypatch, twins, seconds):
    """Seconds of a call of the kernels by name, 1 by torch."""

    def clock(call):
        before = twins.copy()
        call()
        (name,) = (twins - before) or (None,)
        return seconds.get(name, 1.0)

    monkeypatch.setattr(kernel_trial, "cuda_seconds", clock)


FAST = [(), ("add_norm",), ("turned", "gated"), ("draw",), tuple(NAMES)]


@pytest.mark.parametrize("fast", FAST)
def test_a_kernel_is_used_where_it_is_faster_and_alone(monkeypatch, twins, fast):
    engine, tree = merged(), cartesian(3, 2)
    wanted = decode(engine, tree=tree, temperature=0.8)[-1].token_ids
    by_calls(monkeypatch, twins, dict.fromkeys(fast, 0.5))
    assert kernel_trial.try_kernels(engine.backbone) == [NAMES[name] for name in fast]
    assert marks() == []
    twins.clear()
    engine.forget()
    engine = on(engine, CudaGraphStep(engine.backbone))
    assert decode(engine, tree=tree, temperature=0.8)[-1].token_ids == wanted
    assert set(twins) == set(fast)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", ["wrong", "no number", "fails"])
def test_a_fault_in_a_kernel_costs_that_one_alone(monkeypatch, caplog, twins, name, fault):
    engine = merged()
    by_calls(monkeypatch, twins, dict.fromkeys(NAMES, 0.5))
    real = fused_kernels.kernel

    def kernel(asked):
        def call(*given):
            if fault == "fails":
                raise RuntimeError("no such architecture")
            found = real(asked)(*given)
            first = found if isinstance(found, torch.Tensor) else found[0]
            first.fill_(torch.nan) if fault == "no number" else first.add_(first.max())
            return found

        return call if asked == name else real(asked)

    monkeypatch.setattr(fused_kernels, "kernel", kernel)
    notes = kernel_trial.try_kernels(engine.backbone)
    assert notes == [text for other, text in NAMES.items() if other != name]
    assert len(caplog.records) == 1 and NAMES[name] in caplog.text
    ops, rows = engine.backbone.model.model.layers[0].ops, engine.backbone.rows
    assert name not in vars(rows) and name not in vars(ops)


@pytest.mark.parametrize("content", ["", "[1]", "\x00"])
def test_a_mark_that_cannot_be_read_or_written_is_none(monkeypatch, content):
    mark = paths.state_dir() / "kernels" / "quantised-product.json"
    mark.parent.mkdir(parents=True)
    mark.write_text(content)
    monkeypatch.setattr(kernel_trial, "_quantised_product", lambda *asked: ["tried"])
    monkeypatch.setattr(split_attention, "use_where_faster", lambda *asked: [])
    backbone = engine_of(tiny("llama")).backbone
    assert kernel_trial.try_kernels(backbone) == ["tried"] and marks() == []

    def full(*asked):
        raise OSError(28, "no space")

    monkeypatch.setattr(kernel_trial.paths, "write_text", full)
    assert kernel_trial.try_kernels(backbone) == ["tried"] and marks() == []


def test_a_lost_device_is_no_disagreement(caplog):
    def lose():
        raise torch.AcceleratorError("CUDA error: an illegal memory access")

    with pytest.raises(torch.AcceleratorError):
        agrees("torch", lose, 1.0)
    assert not caplog.records


def test_a_lost_device_that_triton_meets_first_is_none_either(monkeypatch, caplog):
    """The mark of the kernel at fault stays, and not that of the next one."""

    def launch():
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    assert not agrees("torch", launch, 1.0) and len(caplog.records) == 1
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(torch.AcceleratorError):
        agrees("torch", launch, 1.0)


def lost():
    raise torch.AcceleratorError("CUDA error: an illegal memory access")
