"""Levels of a draft that are read at once: the same tree, one copy to the host, nothing before."""

import logging

import pytest
import torch
from support import dflash_files, eagle_files, path_head_files
from support.fake_device import DEVICE, fake_device
from support.families import CONTEXT, VOCABULARY, tiny
from support.followers import CPU, HIDDEN, followed, require_plain_text, write
from support.operators import Operators

from medusa_chat.checkpoints.dflash_weights import read_dflash
from medusa_chat.checkpoints.eagle_weights import read_eagle
from medusa_chat.checkpoints.path_head_weights import read_hydra, read_mlp
from medusa_chat.decoding.budget import WHOLE, Allowance
from medusa_chat.decoding.drafters.dflash import DFlash
from medusa_chat.decoding.drafters.drafter import Features
from medusa_chat.decoding.drafters.eagle import Eagle
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.decoding.drafters.path_heads import PathHeads
from medusa_chat.decoding.drafters.recorded_draft import ASKED, RecordedDraft

TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 1]}


def dflash(extra=()):
    return dflash_files.tensors(HIDDEN, taps=1) | dict(extra)


def of_dflash(make):
    return lambda: (make(), dflash_files.config(HIDDEN, taps=(1,)), read_dflash, DFlash)


KINDS = {
    "eagle-1": lambda: (
        eagle_files.eagle_1(HIDDEN),
        eagle_files.config(hidden_size=HIDDEN),
        read_eagle,
        Eagle,
    ),
    "eagle-3": lambda: (
        eagle_files.eagle_3(HIDDEN, VOCABULARY, taps=2),
        eagle_files.config(**TAPS),
        read_eagle,
        Eagle,
    ),
    "two layers": lambda: (
        eagle_files.eagle_3(HIDDEN, VOCABULARY, taps=2, layers=2),
        eagle_files.config(**TAPS, num_hidden_layers=2),
        read_eagle,
        Eagle,
    ),
    "hydra": lambda: (
        path_head_files.hydra(HIDDEN, VOCABULARY, False),
        path_head_files.hydra_config(),
        read_hydra,
        PathHeads,
    ),
    "hydra++": lambda: (
        path_head_files.hydra(HIDDEN, VOCABULARY, True),
        path_head_files.hydra_config(),
        read_hydra,
        PathHeads,
    ),
    "mlp": lambda: (
        path_head_files.mlp(HIDDEN, VOCABULARY),
        path_head_files.mlp_config(HIDDEN, VOCABULARY),
        read_mlp,
        PathHeads,
    ),
    "dflash": of_dflash(dflash),
    "dspark": of_dflash(lambda: dflash(dflash_files.markov(VOCABULARY))),
}


def engine_with(kind, folder):
    tensors, settings, read, drafter = KINDS[kind]()
    return followed(tiny("llama"), write(folder, tensors, settings), read, drafter)


def told(drafter, ids, seed):
    """Tell a drafter of tokens with random states."""
    random = torch.Generator().manual_seed(seed)
    final = torch.randn(len(ids), HIDDEN, generator=random)
    taps = torch.randn(len(ids), max(len(drafter.taps), 1), HIDDEN, generator=random)
    drafter.observe(Features(ids, final, taps))


def pair_of(kind, folder, vocabulary=VOCABULARY):
    """A drafter that the host leads, and one of the same model that reads all levels at once."""
    engine = engine_with(kind, folder)
    model, drafter = engine.follower.model, type(engine.follower)
    led, at_once = (drafter(model, CONTEXT, vocabulary) for _ in range(2))
    at_once.recorded = RecordedDraft(CPU)
    return led, at_once


@pytest.mark.parametrize("kind", KINDS)
def test_all_levels_at_once_give_the_tree_of_one_after_another(kind, tmp_path):
    pair = pair_of(kind, tmp_path)
    text, at = [(7 * n + 3) % VOCABULARY for n in range(80)], 0
    rounds = (25, 1, 3, 1, 1, 6, 2, 1, 1, 1, 2)
    for number, count in enumerate(rounds):
        for drafter in pair:
            told(drafter, text[at : at + count], number)
        at += count
        for nodes, depth in ((6, 8), (24, 8), (24, 2), (2, 8)):
            one, other = (d.draft(text[at], depth, Allowance(nodes, WHOLE)) for d in pair)
            assert one.tokens == other.tokens and one.tree == other.tree
            assert one.tree.depth <= depth and len(one.tree) <= nodes
            assert one.shares[1:] == pytest.approx(other.shares[1:], abs=1e-5)
        if number == 6:
            for drafter in pair:
                drafter.crop(at - 2)
            at -= 2
    assert pair[1].recorded._made and at > 40


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_plain_decoding(kind, tmp_path):
    engine = engine_with(kind, tmp_path)
    engine.follower.recorded = RecordedDraft(CPU)
    require_plain_text(engine)
    assert engine.follower.recorded._made


@pytest.mark.parametrize("kind", ["eagle-3", "mlp", "dspark"])
def test_tokens_that_the_backbone_lacks_have_no_children(kind, tmp_path):
    pair = pair_of(kind, tmp_path, 10)
    for drafter in pair:
        told(drafter, [3, 4, 5], 0)
    one, other = (drafter.draft(3, 4, Allowance(30, WHOLE)) for drafter in pair)
    assert one.tokens == other.tokens and 1 < len(one.tokens) and max(one.tokens[1:]) < 10


@pytest.mark.parametrize("kind", ["eagle-3", "hydra"])
def test_broken_numbers_draft_nothing(kind, tmp_path):
    for drafter in pair_of(kind, tmp_path):
        nothing = torch.full((3, HIDDEN), torch.nan)
        drafter.observe(Features([3, 4, 5], nothing, nothing[:, None].repeat(1, 2, 1)))
        assert len(drafter.draft(3, 4, Allowance(8, WHOLE)).tree) == 1


def test_what_cannot_be_recorded_is_drafted_by_operators(monkeypatch, tmp_path, caplog):
    led, at_once = pair_of("eagle-3", tmp_path)

    def refused(body):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(at_once.recorded._capture, "recorded", refused)
    for drafter in (led, at_once):
        told(drafter, [3, 4, 5], 0)
    with caplog.at_level(logging.WARNING):
        for root in range(ASKED + 3):
            one, other = (d.draft(root, 4, Allowance(8, WHOLE)) for d in (led, at_once))
            assert one.tokens == other.tokens
    (line,) = caplog.messages
    assert "not permitted" in line


# The same on a device that stands for a GPU.


def launched(kind, folder, levels) -> int:
    """The kernels of a draft, on fake tensors: what would wait for the device raises."""
    engine = engine_with(kind, folder)
    model, drafter = engine.follower.model, type(engine.follower)
    lent = getattr(model, "_lent", None)
    if lent is not None:
        head = lent.head
        head.linear.to(DEVICE)
        model._lent = Lent(lent.embedding.to(DEVICE), head, lent.config)
    model.to(DEVICE)
    model.device, model.ids = DEVICE, None
    with fake_device():
        made = drafter(model, CONTEXT, VOCABULARY)
        taps = torch.empty(5, max(len(made.taps), 1), HIDDEN)
        made.observe(Features([1, 2, 3, 4, 5], torch.empty(5, HIDDEN), taps))
        with torch.inference_mode(), Operators() as operators:
            words = made._levels(levels, *([] if drafter is PathHeads else [64]))
        assert words.device == DEVICE and words.dim() == 1
    return operators.found.total()


# kernels of a draft's first level, and of each one after it
KERNELS = {
    "eagle-1": (70, 83),
    "eagle-3": (77, 90),
    "hydra": (21, 32),
    "mlp": (24, 35),
    "dflash": (137, 21),
    "dspark": (141, 24),
}


@pytest.mark.parametrize("kind", KERNELS)
def test_no_level_waits_for_the_device_and_each_launches_as_many_kernels(kind, tmp_path):
    one, two, three = (launched(kind, tmp_path / str(n), n) for n in (1, 2, 3))
    assert (one, three - two) == KERNELS[kind], (one, two, three)
