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
from medusa_chat.checkpoints.drafter_reading import Along, Reading, best_reading, clearly_best
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


@pytest.mark.parametrize(
    ("tried", "gained", "is_clear"),
    [(190, 8, False), (190, 12, True), (24, 2, False), (24, 5, True)],
)
def test_another_reading_must_be_clearly_better_than_chance(tried, gained, is_clear):
    own, other = Reading("own", 10 / tried, 0.0, tried), Reading("other", 10 / tried, 0.0, tried)
    other = replace(other, second=gained / tried)
    assert clearly_best([own, other]) is (other if is_clear else own)


def test_what_one_reading_does_not_draft_is_not_compared():
    own, other = Reading("own", 0.5, None, 24), Reading("other", 0.4, 0.4, 24)
    assert clearly_best([own, other]) is own
    assert "the one after it" not in own.words and "the one after it in 40%" in other.words


FORMS = [{}, {"is_causal": (True, False)}, {"windows": (2, None)}, {"reads_root": True}]


@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_the_joint_pass_of_some_blocks_is_the_pass_of_each(tmp_path, changes):
    made = blocks(tmp_path, **changes)
    form, count, tokens = made.form, 5, torch.tensor([3, 9, 17, 30, 8])
    torch.manual_seed(7)
    taps = torch.randn(count, 2, HIDDEN)
    best = torch.tensor([0, 17, 30, 11, 40])  # after the roots 1 and 2 it is the text's
    alone, hits = [], []
    with torch.inference_mode():
        for root in (1, 2, 3):
            cache = made.cache(count + form.block)
            made.read(taps[:root], cache)
            rows = made(int(tokens[root]), cache)
            alone.append(rows)
            drafted = rows[form.block - form.deepest :]
            first, second = made.scores(drafted[:2]) + made.markov(
                torch.stack([tokens[root], best[root]])
            )
            if root == 2:
                best[root + 1] = second.argmax()
            is_text = best[root] == tokens[root + 1]
            hits.append(
                (first.argmax() == best[root], is_text and second.argmax() == best[root + 1])
            )
        joint = []
        made.norm.register_forward_hook(lambda _m, _g, out: joint.append(out))
        found = drafter_reading._dflash_tried(made, Along(tokens, taps[:, 0], taps, best, (2, 4)))
    assert sum(int(hit) for _, hit in hits) in (1, 2)
    assert torch.allclose(joint[0], torch.cat(alone), atol=1e-5)
    first, second = (sum(map(int, column)) / 3 for column in zip(*hits, strict=True))
    assert (found.first, found.second) == pytest.approx((first, second)) and found.tried == 3


def blocks(folder, **changes):
    """A random DFlash drafter of this form, with a term for neighbours."""
    tensors = dflash_files.tensors(HIDDEN) | dflash_files.markov(VOCABULARY)
    tensors |= {"lm_head.weight": torch.randn(VOCABULARY, HIDDEN)}
    settings = dflash_files.config(HIDDEN, taps=(2, 4), sample_from_anchor=False)
    found = drafter_in(LocalFolder(write(folder / "drafter", tensors, settings)))
    torch.manual_seed(1)
    lent = Lent(torch.nn.Embedding(VOCABULARY, HIDDEN), None)
    made = read_dflash(found, lent, Sizes(HIDDEN, 6, VOCABULARY), CPU, torch.float32)
    made.form = replace(made.form, **changes)
    return made
