"""The DFlash drafter: a pass is z-lab's, its text plain decoding's, its cache a fresh reading's."""

import json
from pathlib import Path

import pytest
import torch
from support import dflash_files, reference_dflash
from support.families import CONTEXT, VOCABULARY, tiny
from support.followers import CPU, HIDDEN, followed, require_plain_text, write

from medusa_chat.checkpoints.dflash_weights import read_dflash
from medusa_chat.checkpoints.layouts.drafter_file import Sizes
from medusa_chat.checkpoints.layouts.drafters import drafter_in
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.decoding.budget import WHOLE, Allowance
from medusa_chat.decoding.drafters.dflash import DFlash
from medusa_chat.decoding.drafters.drafter import Features
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.decoding.layer_forms import embedding_scale

BLOCK = dflash_files.BLOCK
REFERENCE = Path(reference_dflash.__file__).with_suffix(".json")


def model_of(folder, extra=None, embedding=None, head=None, **changes):
    torch.manual_seed(2)
    tensors = dflash_files.tensors(HIDDEN) | (extra or {})
    found = drafter_in(LocalFolder(write(folder, tensors, dflash_files.config(HIDDEN, **changes))))
    lent = Lent(
        embedding or torch.nn.Embedding(VOCABULARY, HIDDEN),
        head or torch.nn.Linear(HIDDEN, VOCABULARY, bias=False),
    )
    return read_dflash(found, lent, Sizes(HIDDEN, 6, VOCABULARY), CPU, torch.float32)


def test_two_blocks_are_those_of_the_reference(tmp_path):
    rows = torch.cat([reference_dflash.block(1), reference_dflash.block(2)])
    model = model_of(tmp_path, embedding=torch.nn.Embedding.from_pretrained(rows))
    cache = model.cache(32)
    expected = json.loads(REFERENCE.read_text())
    for at, (start, count) in enumerate([(0, 5), (5, 3)]):
        model.read(reference_dflash.context(start, count).view(count, 2, HIDDEN), cache)
        places = torch.arange(cache.length, cache.length + BLOCK)
        tokens = at * BLOCK + torch.arange(BLOCK)
        out = model.filled(tokens, places, model.masks(places, cache.length), cache)
        assert torch.allclose(out[:, :4], torch.tensor(expected[at]), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite"])
def test_the_backbone_s_embeddings_have_its_family_s_scale(family, tmp_path):
    folder = write(
        tmp_path, dflash_files.tensors(HIDDEN, taps=1), dflash_files.config(HIDDEN, (1,))
    )
    backbone = tiny(family)
    made = followed(backbone, folder, read_dflash, DFlash).follower.model
    decoder, tokens = backbone.get_decoder(), torch.tensor([3, 9])
    rows = decoder.embed_tokens.weight[tokens] * embedding_scale(decoder)
    assert embedding_scale(decoder) != 1 or family == "llama"
    assert torch.allclose(made._embedded(tokens), rows, atol=1e-6)


def test_padding_beyond_its_own_table_reads_its_last_row(tmp_path):
    model = model_of(tmp_path, {"embed_tokens.weight": torch.randn(48, HIDDEN)})
    cache = model.cache(32)
    model.read(torch.randn(3, 2, HIDDEN), cache)
    assert torch.equal(model(60, cache), model(47, cache))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("is_spark", [False, True])
def test_the_text_is_that_of_plain_decoding(family, is_spark, tmp_path):
    tensors = dflash_files.tensors(HIDDEN, taps=1)
    tensors |= dflash_files.markov(VOCABULARY) if is_spark else {}
    folder = write(tmp_path, tensors, dflash_files.config(HIDDEN, taps=(1,)))
    engine = followed(tiny(family), folder, read_dflash, DFlash)
    assert engine.follower.model.form.reads_root == is_spark
    require_plain_text(engine)


def drafted(model, root=8, nodes=12, depth=9):
    drafter = DFlash(model, CONTEXT, VOCABULARY)
    torch.manual_seed(1)
    drafter.observe(Features([5, 9, 13], None, torch.randn(3, 2, HIDDEN)))
    return drafter, drafter.draft(root, depth, Allowance(nodes, WHOLE))


def test_layers_that_add_nothing_predict_what_the_mask_s_embedding_says(tmp_path):
    nothing = {
        name: torch.zeros_like(tensor)
        for name, tensor in dflash_files.tensors(HIDDEN).items()
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    model = model_of(tmp_path, nothing)
    _, found = drafted(model)
    mask = model.norm(model._lent.embedding.weight[dflash_files.MASK])
    shares, best = model._lent.head(mask).detach().softmax(-1).max(-1)
    first = [n for n in range(1, len(found.tree)) if found.tree.ranks[n] == 0]
    assert found.tree.depth > 1
    for node in first:
        assert found.tokens[node] == int(best)
        assert found.shares[node] == pytest.approx(float(shares), abs=1e-5)


def test_the_tree_has_the_most_probable_nodes(tmp_path):
    _, found = drafted(model_of(tmp_path), nodes=10)
    reached = [1.0]
    for node, parent in enumerate(found.tree.parents[1:], start=1):
        reached.append(reached[parent] * found.shares[node])
    _, more = drafted(model_of(tmp_path), nodes=60)
    all_reached = [1.0]
    for node, parent in enumerate(more.tree.parents[1:], start=1):
        all_reached.append(all_reached[parent] * more.shares[node])
    assert sorted(reached)[::-1] == pytest.approx(sorted(all_reached)[::-1][:10], abs=1e-6)


def test_with_a_term_for_neighbours_children_depend_on_their_parent(tmp_path):
    extra = dflash_files.markov(VOCABULARY)
    model = model_of(tmp_path, extra)
    drafter, found = drafted(model, nodes=30)
    one, two = (extra[f"markov_head.markov_w{place}.weight"] for place in (1, 2))
    deep = [n for n in range(1, len(found.tree)) if found.tree.parents[n] > 0]
    assert len({found.tokens[found.tree.parents[n]] for n in deep}) > 1
    for node in deep:
        before = found.tokens[found.tree.parents[node]]
        logits = drafter._scores[found.tree.depths[node] - 1] + two @ one[before]
        expected = float(logits.softmax(-1)[found.tokens[node]])
        assert found.shares[node] == pytest.approx(expected, abs=1e-5)


def test_causal_rows_see_no_later_ones_and_sliding_ones_no_old_text(tmp_path):
    causal = model_of(tmp_path / "a", is_causal=True)
    cache = causal.cache(32)
    causal.read(torch.randn(4, 2, HIDDEN), cache)
    places = torch.arange(4, 4 + BLOCK)
    tokens = torch.arange(BLOCK)
    whole = causal.filled(tokens, places, causal.masks(places, 4), cache)
    part = causal.filled(tokens[:3], places[:3], causal.masks(places[:3], 4), cache)
    assert torch.allclose(whole[:3], part, atol=1e-5)
    kinds = ["sliding_attention", "full_attention"]
    model = model_of(tmp_path / "b", layer_types=kinds, sliding_window=3)
    assert model.form.is_causal == (True, False) and model.form.windows == (3, None)
    seen = [(mask[0] == 0).tolist() for mask in model.masks(places[:2], 4)]
    assert seen == [[False, False, True, True, True, False], [True] * 6]


@pytest.mark.parametrize("kept", [[1, 1, 1], [3, 1, 4]])
def test_after_any_rounds_the_draft_is_that_of_a_fresh_reading(tmp_path, kept):
    model, taps = model_of(tmp_path), torch.randn(16, 2, HIDDEN)
    drafter, end = DFlash(model, CONTEXT, VOCABULARY), 4
    drafter.observe(Features(range(4), None, taps[:4]))
    for count in kept:
        drafter.draft(7, 5, Allowance(8, WHOLE))
        drafter.observe(Features(range(count), None, taps[end : end + count]))
        end += count
    drafter.crop(end - 1)
    drafter.observe(Features([1], None, taps[end - 1 : end]))
    fresh = DFlash(model, CONTEXT, VOCABULARY)
    fresh.observe(Features(range(end), None, taps[:end]))
    mine, theirs = (one.draft(7, 5, Allowance(8, WHOLE)) for one in (drafter, fresh))
    assert mine.tokens == theirs.tokens and drafter.length == end
    assert mine.shares[1:] == pytest.approx(theirs.shares[1:], abs=1e-5)
