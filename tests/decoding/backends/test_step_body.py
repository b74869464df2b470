"""The body of a recorded step on fake tensors of a device that stands for a GPU: it never waits for
the device, and touches nothing that lies elsewhere."""

import pytest
import torch
from support.adopted import adopt_split_attention
from support.fake_device import DEVICE, fake_device
from support.recorded_steps import SETTINGS, TREES, step_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa_chat.decoding.backends import split_attention


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("asked", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_no_step_waits_for_the_device_or_leaves_it(tree, asked, details):
    with fake_device():
        step = step_of("llama", tree, details, **asked)
        step.body()
        assert step.out.device == DEVICE and step.out.dim() == 1


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-mixed", "gemma3", "gpt2"])
def test_families_with_masks_and_layers_of_their_own_neither(family):
    with fake_device():
        step = step_of(family, TREES["tree"], True, temperature=0.7)
        step.body()
        assert step.out.device == DEVICE


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed", "gemma3", "gpt2"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_attention_in_splits_neither(monkeypatch, family, tree):
    """The text's length is read by the kernel, and by nothing else."""
    launched = adopt_split_attention(monkeypatch)
    with fake_device():
        step = step_of(family, tree, True, temperature=0.7, implementation=split_attention.NAME)
        step.body()
        assert step.out.device == DEVICE and launched["split"] == 2


def test_drafts_from_a_shortlist_neither():
    with fake_device():
        step = step_of("llama", TREES["tree"], shortlist=[3, 5, 7, 9, 20, 21])
        step.body()
        assert step.out.device == DEVICE


@pytest.mark.parametrize("asked", SETTINGS.values(), ids=SETTINGS)
def test_heads_that_read_the_root_neither(asked):
    with fake_device():
        step = step_of("llama", TREES["tree"], True, has_root=True, **asked)
        step.body()
        assert step.out.device == DEVICE


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float16), ("gemma3", torch.bfloat16)]
)
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_logits_in_fp32_of_a_model_in_16_bits_neither(family, dtype, kind):
    with fake_device():
        asked = SETTINGS[kind]
        step = step_of(family, TREES["tree"], True, dtype=dtype, is_wide=True, **asked)
        run, seen = step._run, []

        def spy(draft):
            hidden, logits = run(draft)
            seen.append((hidden.dtype, logits.dtype))
            return hidden, logits

        step._run = spy
        step.body()
        assert step.out.device == DEVICE and seen == [(dtype, torch.float32)]


class Dtypes(TorchDispatchMode):
    """found: the dtypes of all that operators make."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        self.found |= {t.dtype for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


def test_nothing_is_computed_in_fp64():
    """As attention in 16 bits is on a CPU: most cards have few units for it."""
    with fake_device():
        step = step_of("llama", TREES["tree"], True, dtype=torch.float16, temperature=0.7)
        with Dtypes() as seen:
            step.body()
    assert torch.float16 in seen.found and torch.float64 not in seen.found


FAULTS = {
    "a number that is read": lambda state: state.cur.item(),
    "a list that is read": lambda state: state.hidden.tolist(),
    "a tensor of the host": lambda state: state.hidden + torch.ones(1, 1, device="cpu"),
    "a copy from the host": lambda state: state.hidden.copy_(torch.ones(1, device="cpu")),
    "a copy to the host": lambda state: state.hidden.cpu(),
    "a choice by a number": lambda state: 1 if state.cur > 3 else 2,
    "one element written": lambda state: state.cur.__setitem__(0, 5),
    "a size that depends on numbers": lambda state: state.hidden.nonzero(),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_wait_is_seen(fault):
    with fake_device():
        step = step_of("llama", TREES["tree"])
        run = step._run

        def planted(draft):
            fault(step._state)
            return run(draft)

        step._run = planted
        with pytest.raises((RuntimeError, AssertionError)):
            step.body()
