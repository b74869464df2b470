"""What steps should cost before any was seen: on a GPU by its data sheet."""

from types import SimpleNamespace

import pytest
import torch
from support.inspected import VICUNA

from medusa_chat.checkpoints import step_prior as prior
from medusa_chat.checkpoints.gpus import GPUS, Gpu, gpu_of
from medusa_chat.checkpoints.machine import Cpu
from medusa_chat.checkpoints.step_prior import step_prior
from medusa_chat.trees.auto_tree import best_size, rank_accuracies, source_tree
from medusa_chat.trees.expected_length import expected_lengths

CUDA, CPU, MPS = (torch.device(name) for name in ("cuda", "cpu", "mps"))
OWN_LM_HEADS = 5 * (4096 * 4096 + 4096 * 32000)
EXPECTED = expected_lengths(source_tree(None, 5), rank_accuracies(None))


def card(name, capability=(8, 6), count=28, clock=1_777_000, memory=7_501_000, width=192):
    """What torch tells of a card; an RTX 3060 where nothing else is said."""
    major, minor = capability
    known = {"name": name, "major": major, "minor": minor, "multi_processor_count": count}
    clocks = {"clock_rate": clock, "memory_clock_rate": memory, "memory_bus_width": width}
    return SimpleNamespace(**known, **{k: v for k, v in clocks.items() if v is not None})


def nodes_on(monkeypatch, properties, precision, config=VICUNA, device=CUDA, heads=OWN_LM_HEADS):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return best_size(EXPECTED, step_prior(device, precision, False, config, heads))


@pytest.mark.parametrize(
    ("name", "precision", "least", "most"),
    [
        ("NVIDIA GeForce RTX 3060", "nf4", 8, 16),
        ("NVIDIA GeForce RTX 3090", "fp16", 32, 64),
        ("NVIDIA GeForce RTX 4090", "nf4", 16, 32),
        ("NVIDIA H200", "nf4", 8, 8),
        ("NVIDIA A100-SXM4-80GB", "fp16", 64, 64),
        ("NVIDIA H100 80GB HBM3", "fp16", 64, 64),
        ("NVIDIA H200", "bf16", 64, 64),
        ("NVIDIA H200", "int8", 8, 16),
    ],
)
def test_a_7b_starts_with_what_its_card_can_pay(monkeypatch, name, precision, least, most):
    assert least <= nodes_on(monkeypatch, card(name), precision) <= most


@pytest.mark.parametrize("precision", ["fp16", "nf4", "int8"])
def test_less_arithmetic_never_means_more_nodes(monkeypatch, precision):
    found = []
    for flops in (1e12, 5e12, 20e12, 80e12, 300e12, 1e15):
        gpu = Gpu("a card", flops, 1e12, flops / 512)
        monkeypatch.setattr(prior, "gpu_of", lambda properties, gpu=gpu: gpu)
        found.append(nodes_on(monkeypatch, None, precision))
    least = 3 if precision == "fp16" else 2  # the products of each row cost as much on any card
    assert found == sorted(found) and len(set(found)) >= least


@pytest.mark.parametrize(
    ("properties", "tera", "giga"),
    [
        (card("NVIDIA GeForce RTX 3060"), 25.5, 360),
        (
            card("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 76, 2_040_000, 9_001_000, 256),
            79,
            576,
        ),
        (card("NVIDIA GeForce RTX 4090 D", (8, 9)), 165, 1008),
        (card("NVIDIA RTX A6000"), 155, 768),
        (card("NVIDIA A40"), 150, 696),
        (card("Tesla T4", (7, 5), 40, 1_590_000, 5_001_000, 256), 32.6, 320),
    ],
)
def test_a_card_is_known_by_its_name_or_its_clocks(properties, tera, giga):
    found = gpu_of(properties)
    assert found.flops == pytest.approx(tera * 1e12, rel=0.02)
    assert found.bandwidth == pytest.approx(giga * 1e9, rel=0.02)


def test_every_named_card_is_found_under_nvidias_names():
    names = ("GeForce RTX 3090", "GeForce RTX 4090", "GeForce RTX 5090", "A40", "RTX A6000")
    names += ("A100 80GB PCIe", "H100 PCIe", "H200")
    assert [gpu_of(card(f"NVIDIA {name}")) for name in names] == list(GPUS)


@pytest.mark.parametrize(
    "properties",
    [card("A4000", clock=None), card("new", (13, 0)), card("RTX 4090 Laptop GPU", memory=0)],
)
def test_what_is_not_known_starts_cautiously(monkeypatch, properties):
    assert gpu_of(properties) is None
    known = nodes_on(monkeypatch, properties, "fp16")
    assert 8 <= known <= 24
    experts = VICUNA | {"num_local_experts": 8}
    assert nodes_on(monkeypatch, card("NVIDIA H100"), "fp16", experts) == known
    assert nodes_on(monkeypatch, card("NVIDIA H100"), "fp16", {}) == known
    assert nodes_on(monkeypatch, None, "fp16", device=MPS) == known


@pytest.mark.parametrize("has_amx", [False, True])
def test_rows_are_dear_on_a_cpu_without_tiles(monkeypatch, has_amx):
    monkeypatch.setattr(prior, "this_cpu", lambda: Cpu(has_amx))

    def eight(precision, is_native, **more):
        return step_prior(CPU, precision, is_native, VICUNA, 0, **more).costs()[7]

    dear = eight("fp32", True)
    assert dear == eight("fp32", False) == eight("int8", True) == eight("nf4", False) > 1.8
    assert (eight("bf16", True) < 1.2) == has_amx
    assert eight("bf16", True, is_packed=True) == dear, "AMX multiplies no numbers of a GGUF file"
    assert eight("bf16", False) < 1.2, "torch's operators cost more than a row"
