"""A drafter's reading is found on the backbone, whatever its config says."""

from dataclasses import replace

import pytest
import torch
from support import dflash_files, eagle_files
from support.engines import engine_of
from support.families import VOCABULARY, tiny
from support.followers import write

from medusa_chat.checkpoints import drafter_reading
from medusa_chat.checkpoints.dflash_weights import read_dflash
from medusa_chat.checkpoints.drafter_reading import best_reading
from medusa_chat.checkpoints.eagle_weights import read_eagle
from medusa_chat.checkpoints.layouts.drafter_file import Sizes
from medusa_chat.checkpoints.layouts.drafters import drafter_in
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.decoding.drafters.own_layers import Lent

CPU = torch.device("cpu")
HIDDEN, TEXT = 32, [(7 * i + 3) % VOCABULARY for i in range(90)]


def taught(folder, taps, feeds_norm=False):
    """(a drafter of a random backbone that was trained by these taps, the backbone): its LM head
    alone, by least squares, which is enough to tell readings apart."""
    model = tiny("llama", num_hidden_layers=6)
    backbone = engine_of(model, heads=0).backbone
    tensors = eagle_files.eagle_3(HIDDEN, VOCABULARY, taps=len(taps))
    tensors |= {"lm_head.weight": torch.zeros(VOCABULARY, eagle_files.WIDTH)}
    del tensors["d2t"]
    settings = eagle_files.config(eagle_aux_hidden_state_layer_ids=list(taps))
    found = drafter_in(LocalFolder(write(folder / "drafter", tensors, settings)))
    own = Lent(model.get_input_embeddings(), backbone.lm_head)
    made = read_eagle(found, own, Sizes(HIDDEN, 6, VOCABULARY), CPU, torch.float32)
    made.form = replace(made.form, feeds_norm=feeds_norm)
    backbone.tap(taps)
    hidden = backbone.run_chunk(torch.tensor(TEXT))
    states, best = made.fused(hidden, backbone.tapped), backbone.lm_head(hidden).argmax(-1)
    rows = []
    made.norm.register_forward_hook(lambda _m, _g, out: rows.append(out))
    cache, given = made.cache(len(TEXT)), torch.tensor(TEXT)
    places = torch.arange(len(TEXT) - 1)
    out, _ = made(states[:-1], given[1:], places, None, cache)
    made(out[:-1], given[2:], places[1:], None, cache)
    wanted = torch.nn.functional.one_hot(torch.cat([best[1:], best[2:]]), VOCABULARY).float()
    made.head.weight.copy_(20 * torch.linalg.lstsq(torch.cat(rows), wanted).solution.T)
    made.norm._forward_hooks.clear()
    return made, backbone


def test_the_reading_of_the_file_is_kept_where_it_is_right(tmp_path):
    made, backbone = taught(tmp_path, (2, 4))
    found = best_reading(made, backbone, TEXT)
    assert found.form.taps == made.form.taps == (2, 4) and not found.form.feeds_norm
    assert found.first > 0.5 and "reads layers 2, 4: its best token" in found.words
    assert backbone.cache.length == 0


@pytest.mark.parametrize("moved", [1, -1])
def test_layers_that_are_one_off_are_put_right(tmp_path, moved):
    made, backbone = taught(tmp_path, (2, 4))
    made.form = replace(made.form, taps=tuple(tap + moved for tap in made.form.taps))
    assert best_reading(made, backbone, TEXT).form.taps == (2, 4) == made.form.taps


def test_a_fed_back_norm_that_is_not_said_is_seen(tmp_path):
    made, backbone = taught(tmp_path, (2, 4), feeds_norm=True)
    made.form = replace(made.form, feeds_norm=False)
    assert best_reading(made, backbone, TEXT).form.feeds_norm


def test_a_drafter_of_another_model_is_told(tmp_path):
    made, backbone = taught(tmp_path, (2, 4))
    made.head.weight.copy_(made.head.weight.roll(1, 0))
    found = best_reading(made, backbone, TEXT)
    assert found.form.taps == (2, 4) and "does not fit this model" in found.words


def taught_blocks(folder, **changes):
    """The same of a DFlash drafter, of the two first rows of its blocks."""
    model = tiny("llama", num_hidden_layers=6)
    backbone = engine_of(model, heads=0).backbone
    tensors = dflash_files.tensors(HIDDEN) | {"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN)}
    settings = dflash_files.config(HIDDEN, taps=(2, 4))
    found = drafter_in(LocalFolder(write(folder / "drafter", tensors, settings)))
    lent = Lent(model.get_input_embeddings(), backbone.lm_head)
    made = read_dflash(found, lent, Sizes(HIDDEN, 6, VOCABULARY), CPU, torch.float32)
    right = made.form
    made.form = replace(right, **changes)
    along = drafter_reading._along(backbone, TEXT, [2, 3, 4, 5])
    rows = []
    made.norm.register_forward_hook(lambda _m, _g, out: rows.append(out))
    with torch.inference_mode():
        drafter_reading._dflash_tried(made, along)
    made.norm._forward_hooks.clear()
    blocks = rows[0].view(-1, made.form.block, HIDDEN)[:, made.form.block - made.form.deepest :]
    roots = torch.arange(1, len(TEXT) - 1, (len(TEXT) - 2) // drafter_reading.ANCHORS)
    roots = roots[: drafter_reading.ANCHORS]
    wanted = torch.cat([along.best[roots], along.best[roots + 1]])
    wanted = torch.nn.functional.one_hot(wanted, VOCABULARY).float()
    states = torch.cat([blocks[:, 0], blocks[:, 1]])
    made.head.weight.copy_(20 * torch.linalg.lstsq(states, wanted).solution.T)
    made.form = right
    return made, backbone


@pytest.mark.parametrize(
    "changes",
    [{}, {"taps": (3, 5)}, {"reads_root": True}, {"is_causal": (True, True)}],
    ids=["as it stands", "one layer further", "the root's row is read", "causal"],
)
def test_a_block_is_read_as_it_was_trained(tmp_path, changes):
    made, backbone = taught_blocks(tmp_path, **changes)
    expected = replace(made.form, **changes)
    assert best_reading(made, backbone, TEXT).form == expected == made.form
