"""Our kernels at a load: what is chosen and agrees is used, and a lost device is remembered; what
`doctor --gpu` times overrides the choice. There is no GPU here: kernels are their torch references,
and clocks are scripted."""

import json
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import bitsandbytes  # noqa: F401  # before a test pretends a GPU, which it would look at
import psutil
import pytest
import torch
from support.engines import decode, engine_of, on
from support.families import tiny

from medusa_chat import paths
from medusa_chat.checkpoints import devices, kernel_times, kernel_trial
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.cli.main import main
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.backends import fused_kernels, quantised, split_attention
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.backends.parity import agrees
from medusa_chat.decoding.backends.quantised import QuantisedLinear
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


def choose(monkeypatch, *kernels):
    monkeypatch.setattr(
        kernel_trial, "chosen_kernels", lambda device: (frozenset(kernels), "asked")
    )


def tried(backbone):
    """The notes of a load, without the last, which says why these kernels were chosen."""
    *notes, why = kernel_trial.try_kernels(backbone)
    assert why.startswith("kernels chosen: ")
    return notes


def marks():
    return sorted((paths.state_dir() / "kernels").glob("*"))


@pytest.mark.parametrize("is_chosen", [False, True])
def test_attention_in_splits_is_used_where_it_is_chosen(monkeypatch, kernel, is_chosen):
    engine, tree = engine_of(tiny("llama", hidden_size=64), context=600), cartesian(3, 2)
    wanted = decode(engine, tree=tree)[-1].token_ids
    choose(monkeypatch, *["split-attention"] * is_chosen)
    notes = tried(engine.backbone)
    assert len(notes) == is_chosen and all("split attention" in note for note in notes)
    assert (engine.backbone.implementation == split_attention.NAME) is is_chosen
    kernel.clear()
    engine.forget()
    assert decode(engine, tree=tree)[-1].token_ids == wanted
    assert bool(kernel) is is_chosen and marks() == []


def test_a_kernel_that_decodes_a_tree_otherwise_is_not_used(monkeypatch, kernel):
    engine = engine_of(tiny("llama", hidden_size=64), context=600)
    choose(monkeypatch, "split-attention")
    wrong = SimpleNamespace(run=lambda q, k, v, m, s: kernel.append(512) or 2 * q.transpose(1, 2))
    monkeypatch.setitem(sys.modules, KERNELS, wrong)
    assert tried(engine.backbone) == []
    assert engine.backbone.implementation == "medusa_tree"
    check_steps(engine.backbone)


def test_another_attention_than_ours_is_kept(monkeypatch, kernel):
    backbone = engine_of(tiny("llama", hidden_size=64), "eager", context=600).backbone
    choose(monkeypatch, "split-attention")
    before = backbone.implementation
    assert tried(backbone) == [] and backbone.implementation == before


def test_a_kernel_that_lost_the_device_is_not_tried_again_there(monkeypatch):
    backbone = engine_of(tiny("llama")).backbone

    def lose(backbone, chosen):
        raise torch.AcceleratorError("CUDA error: misaligned address")

    monkeypatch.setattr(kernel_trial, "_use_products", lose)
    choose(monkeypatch, "split-attention")
    monkeypatch.setattr(split_attention, "use", lambda *asked: ["tried"])
    with pytest.raises(torch.AcceleratorError):
        kernel_trial.try_kernels(backbone)
    (mark,) = marks()
    off, other = tried(backbone)  # in the worker that was started again
    assert "quantised-product is not used" in off and str(mark) in off and other == "tried"
    monkeypatch.setattr(kernel_trial, "describe_device", lambda device: "another card")
    monkeypatch.setattr(kernel_trial, "_use_products", lambda *asked: ["tried"])
    assert tried(backbone) == ["tried", "tried"] and marks() == []


def test_a_trial_that_runs_in_another_process_hinders_none(monkeypatch):
    """Two programs that load at once; once the other is gone, its mark tells of a lost device."""
    backbone = engine_of(tiny("llama")).backbone
    choose(monkeypatch)
    monkeypatch.setattr(kernel_trial, "_use_products", lambda *asked: ["tried"])
    mark = paths.state_dir() / "kernels" / "quantised-product.json"
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    left = {"device": kernel_trial.describe_device(backbone.device), "torch": torch.__version__}
    left |= {"pid": other.pid, "started": psutil.Process(other.pid).create_time()}
    for is_over in (False, True):
        paths.write_text(mark, json.dumps(left))
        assert ("tried" in tried(backbone)) is not is_over
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
    ("dtype", "factor", "is_chosen", "is_used"),
    [
        (torch.float16, 1.0, True, True),
        (torch.bfloat16, 1.0, True, True),
        (torch.bfloat16, 1.0, False, False),
        (torch.float16, 1.01, True, False),
        (torch.float16, float("nan"), True, False),
        (torch.float32, 1.0, True, False),
    ],
)
def test_logits_are_fp32_where_the_product_can_give_them(
    monkeypatch, dtype, factor, is_chosen, is_used
):
    """The first of 16 bits; rows of more than a step keep them."""
    engine = engine_of(tiny("llama").to(dtype))
    head, hidden = engine.backbone.lm_head, torch.randn(300, 32).to(dtype)
    with torch.inference_mode():
        narrow = head(hidden[:16])
    wide_product(monkeypatch, factor)
    choose(monkeypatch, *["wide-logits"] * is_chosen)
    notes = tried(engine.backbone)
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
    assert kernel_trial._use_wide_logits(backbone) == []
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


CHOSEN = [(), ("add_norm",), ("turned", "gated"), ("draw",), tuple(NAMES)]


@pytest.mark.parametrize("chosen", CHOSEN)
def test_a_kernel_is_used_where_it_is_chosen_and_alone(monkeypatch, twins, chosen):
    engine, tree = merged(), cartesian(3, 2)
    wanted = decode(engine, tree=tree, temperature=0.8)[-1].token_ids
    choose(monkeypatch, *chosen)
    assert tried(engine.backbone) == [NAMES[name] for name in chosen]
    assert marks() == []
    twins.clear()
    engine.forget()
    engine = on(engine, CudaGraphStep(engine.backbone))
    assert decode(engine, tree=tree, temperature=0.8)[-1].token_ids == wanted
    assert set(twins) == set(chosen)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", ["wrong", "no number", "fails"])
def test_a_fault_in_a_kernel_costs_that_one_alone(monkeypatch, caplog, twins, name, fault):
    engine = merged()
    choose(monkeypatch, *NAMES)
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
    notes = tried(engine.backbone)
    assert notes == [text for other, text in NAMES.items() if other != name]
    assert len(caplog.records) == 1 and NAMES[name] in caplog.text
    ops, rows = engine.backbone.model.model.layers[0].ops, engine.backbone.rows
    assert name not in vars(rows) and name not in vars(ops)


@pytest.mark.parametrize("content", ["", "[1]", "\x00"])
def test_a_mark_that_cannot_be_read_or_written_is_none(monkeypatch, content):
    mark = paths.state_dir() / "kernels" / "quantised-product.json"
    mark.parent.mkdir(parents=True)
    mark.write_text(content)
    choose(monkeypatch)
    monkeypatch.setattr(kernel_trial, "_use_products", lambda *asked: ["tried"])
    backbone = engine_of(tiny("llama")).backbone
    assert tried(backbone) == ["tried"] and marks() == []

    def full(*asked):
        raise OSError(28, "no space")

    monkeypatch.setattr(kernel_trial.paths, "write_text", full)
    assert tried(backbone) == ["tried"] and marks() == []


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


DEVICE = torch.device("cpu")
SMALL = fused_kernels.Sizes(96, 64, (4, 2), 16, 96)


@pytest.fixture
def card(monkeypatch, twins, kernel):
    """The CPU in the place of a card, with kernels that are their references -> the gain of each
    kernel over what it replaces; 1 where none is set."""
    gains, calls = {}, []

    def timed(name, device, dtype):
        calls.append(name)
        return real(name, device, torch.float32 if "product-4" in name else dtype)

    def seconds(call):
        call()
        is_own.append(not is_own[-1])
        return 1 / gains.get(calls[-1], 1.0) if is_own[-1] else 1.0

    real, is_own = kernel_times._calls, [True]
    wide_product(monkeypatch)
    monkeypatch.setattr(kernel_times, "_calls", timed)
    monkeypatch.setattr(kernel_times, "cuda_seconds", seconds)
    monkeypatch.setattr(kernel_times, "SIZES", SMALL)
    monkeypatch.setattr(split_attention, "SHORT", 32)
    monkeypatch.setattr(split_attention, "LONG", 64)
    monkeypatch.setattr(QuantisedLinear, "own", lambda self, hidden: self.many(hidden))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    return gains


def test_doctor_times_all_kernels_and_loads_use_those_that_are_faster(monkeypatch, capsys, card):
    card |= {"add_norm": 1.06, "gated": 0.5, "split-attention": 2.0, "wide-logits": 0.95}
    card |= {"product-4-bit-16-rows": 1.5, "draw": float("nan")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "choose_device", lambda name: DEVICE)
    chosen = {"add_norm", "split-attention", "wide-logits", "product-4-bit-16-rows"}
    assert main(["doctor", "--gpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-1]} == set(kernel_trial.KERNELS)
    assert {line.split()[0] for line in lines if line.endswith("  used")} == chosen
    assert kernel_trial.chosen_kernels(DEVICE) == (chosen, "timed on this card by doctor --gpu")
    assert marks() == []
    for name, value in (("__version__", "9.9"), ("describe_device", lambda device: "other")):
        with monkeypatch.context() as patch:  # measured anew for another version or card
            patch.setattr(kernel_trial, name, value)
            assert kernel_trial.chosen_kernels(DEVICE)[0] == kernel_trial.UNMEASURED
    assert main(["doctor", "--gpu", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["chosen"]) == chosen


def test_a_kernel_that_cannot_run_is_not_timed_and_not_chosen(monkeypatch, twins, card):
    monkeypatch.setattr(fused_kernels, "kernel", lambda name: __import__("no_triton"))
    monkeypatch.delitem(sys.modules, KERNELS)
    times = {time.name: time for time in kernel_times.time_kernels(DEVICE)}
    assert set(times) == set(kernel_trial.KERNELS)
    assert all(times[name].failure and not times[name].is_chosen for name in NAMES)


def test_a_kernel_that_lost_the_device_is_not_timed_again(monkeypatch, card):
    def lose(name, *asked):
        raise torch.AcceleratorError("CUDA error: an illegal memory access")

    with monkeypatch.context() as patch:
        patch.setattr(kernel_times, "_calls", lose)
        with pytest.raises(torch.AcceleratorError):
            list(kernel_times.time_kernels(DEVICE))
    (first, *others) = kernel_times.time_kernels(DEVICE)
    assert "crashed when it was last tried" in first.failure and not any(
        other.failure for other in others
    )


@pytest.mark.parametrize(("capability", "is_measured"), [((9, 0), True), ((8, 9), False)])
def test_a_card_that_nobody_measured_uses_the_cautious_kernels(
    monkeypatch, capability, is_measured
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernel_trial, "describe_device", lambda device: "a card")
    kernels, why = kernel_trial.chosen_kernels(torch.device("cuda"))
    if is_measured:
        assert kernels == set(kernel_trial.KERNELS) and "H200" in why
    else:
        assert "split-attention" not in kernels and "doctor --gpu" in why


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"kernels": 3}', "\x00"])
def test_a_broken_choice_is_none(content):
    file = kernel_trial.keep_choice(DEVICE, frozenset({"draw"}))
    assert kernel_trial.chosen_kernels(DEVICE)[0] == {"draw"}
    file.write_text(content)
    assert kernel_trial.chosen_kernels(DEVICE)[0] == kernel_trial.UNMEASURED
