"""What the paper says (Medusa, arXiv 2401.10774), against what this program computes."""

import json
from pathlib import Path

import pytest
import torch

from medusa_chat.decoding.acceptance import entropies, thresholds
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.training.hardware import (
    GPUS,
    SHAPES,
    attention,
    best_nodes,
    growth,
    linear,
    speedup,
)

TABLES = json.loads(Path(__file__).with_name("paper_tables.json").read_text("utf-8"))
A100 = next(gpu for gpu in GPUS if gpu.name.startswith("A100"))
SMALL, _, LARGE = SHAPES
GROWTH = growth(64, 3.47)  # Table 1, Vicuna-7B


def cells(table: str):
    """(row, q, intensity) of each of its cells."""
    for row, found in TABLES[table].items():
        for q, (_, intensity) in zip(TABLES["q"], found, strict=True):
            yield int(row), q, intensity


def test_table_6_is_the_intensity_of_attention_by_length() -> None:
    for length, q, printed in cells("table6"):
        assert abs(attention(16, q, length, LARGE.head_dim).intensity - printed) <= 0.0051


def test_table_7_is_the_same_whatever_the_batch() -> None:
    for batch, q, printed in cells("table7"):
        assert abs(attention(batch, q, 1024, LARGE.head_dim).intensity - printed) <= 0.0051


def test_table_8_is_the_intensity_of_a_linear_layer() -> None:
    for batch, q, printed in cells("table8"):
        assert abs(linear(batch * q, LARGE.hidden, LARGE.inner).intensity - printed) <= 0.0051


def test_every_cell_of_the_three_tables_is_checked() -> None:
    assert sum(len(list(cells(name))) for name in ("table6", "table7", "table8")) == 168


def test_64_nodes_are_close_to_the_best_for_one_text_of_1024() -> None:
    """Figure 21. The bare model's own best lies where computing begins to bind, at more nodes."""
    best = best_nodes(SMALL, A100, 1, 1024, GROWTH)
    top = speedup(SMALL, A100, 1, 1024, best, GROWTH)
    assert best >= 64 and speedup(SMALL, A100, 1, 1024, 64, GROWTH) > 0.9 * top
    assert speedup(SMALL, A100, 1, 1024, 256, GROWTH) < top


@pytest.mark.parametrize("shape", SHAPES)
def test_64_nodes_lose_for_batches_of_32_and_more(shape) -> None:
    """Figure 22."""
    found = [speedup(shape, A100, batch, 1024, 64, GROWTH) for batch in (1, 2, 4, 8, 16, 32, 64)]
    assert found == sorted(found, reverse=True) and found[0] > 2 and found[5] < 1 > found[6]


def test_best_tree_of_four_texts_hardly_depends_on_their_length() -> None:
    """Figure 23: the best tree stays, the speedup falls."""
    lengths = (128, 1024, 8192)
    best = [best_nodes(SMALL, A100, 4, length, GROWTH) for length in lengths]
    assert max(best) - min(best) <= 2
    found = [speedup(SMALL, A100, 4, n, best[0], GROWTH) for n in lengths]
    assert found == sorted(found, reverse=True)


def test_most_probable_token_is_always_typical_while_alpha_is_below_1() -> None:
    """p_max >= exp(-H), so delta < 1 never refuses it (2.3.1)."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 2, 400).unsqueeze(-1)
    log_p = (scale * torch.randn(400, 50, generator=generator)).log_softmax(-1)
    flat = torch.zeros(1, 50).log_softmax(-1)  # the hardest: p_max = exp(-H)
    log_p = torch.cat((log_p, flat)).double()
    for epsilon in (0.09, 1.0):
        for delta in (0.01, 0.3, 0.999):
            settings = GenerationSettings(
                acceptance="typical", posterior_threshold=epsilon, posterior_alpha=delta
            )
            assert (log_p.max(-1).values.exp() > thresholds(entropies(log_p), settings)).all()
