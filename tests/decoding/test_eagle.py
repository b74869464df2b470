"""The EAGLE drafter: its text is plain decoding's, its cache that of a fresh reading."""

import pytest
import torch
from support import eagle_files
from support.engines import PROMPT
from support.families import CONTEXT, VOCABULARY, tiny
from support.followers import HIDDEN, answer, followed, require_plain_text, texts, write

from medusa_chat.checkpoints.eagle_weights import read_eagle
from medusa_chat.decoding.budget import WHOLE, Allowance
from medusa_chat.decoding.drafters.drafter import Features
from medusa_chat.decoding.drafters.eagle import Eagle


def with_eagle(model, tensors, settings, folder, dtype=torch.float32):
    """An engine of the model with a drafter that follows its text."""
    return followed(model, write(folder / "drafter", tensors, settings), read_eagle, Eagle, dtype)


def eagle_3(folder, model, seed=0, **changes):
    tensors = eagle_files.eagle_3(HIDDEN, VOCABULARY, taps=2, seed=seed)
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 1]}
    dtype = model.dtype
    return with_eagle(model, tensors, eagle_files.config(**taps, **changes), folder, dtype)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral"])
def test_the_text_is_that_of_plain_decoding(family, tmp_path):
    require_plain_text(eagle_3(tmp_path, tiny(family)))


def sure(tensors):
    """A drafter whose layer adds nothing, so that its output is the embedding of the token."""
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    tensors["fc.weight"].zero_()
    tensors["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
    return tensors


def bigram():
    """A model whose next token depends on the last one alone."""
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    return model


def test_a_drafter_that_knows_the_next_token_is_accepted_whole(tmp_path):
    tensors = sure(eagle_files.eagle_1(HIDDEN, has_bias=False))
    engine = with_eagle(bigram(), tensors, eagle_files.config(hidden_size=HIDDEN), tmp_path)
    events = answer(engine, "eagle", nodes=32)
    assert events[-1].token_ids == texts(engine)
    steps = [event for event in events if hasattr(event, "draft")]
    assert len(steps) > 2
    for step in steps[:-1]:
        assert step.path == first_children(step.draft) and len(step.path) > 1


def first_children(draft):
    path = [0]
    pairs = list(zip(draft.parents, draft.ranks, strict=True))
    while (path[-1], 0) in pairs:
        path.append(pairs.index((path[-1], 0)))
    return tuple(path)


@pytest.mark.parametrize("kept", [[1, 1, 1, 1], [3, 1, 4, 2]])
def test_after_any_rounds_the_cache_is_that_of_a_fresh_reading(tmp_path, kept):
    engine = eagle_3(tmp_path, tiny("llama"))
    model, text = engine.follower.model, [5, 9, 13, 7, 30, 5, 9, 17, 2, 40, 11, 12, 13, 14, 15, 16]
    features = torch.randn(len(text), HIDDEN), torch.randn(len(text), 2, HIDDEN)
    allowance = Allowance(8, WHOLE)

    def told(drafter, start, end):
        rows = (part[start:end] for part in features)
        drafter.observe(Features(text[start:end], *rows))

    drafter, end = Eagle(model, CONTEXT, VOCABULARY), 4
    told(drafter, 0, end)
    for count in kept:
        drafter.draft(text[end], 4, allowance)
        told(drafter, end, end + count)
        end += count
    drafter.crop(end - 1)
    told(drafter, end - 1, end)
    fresh = Eagle(model, CONTEXT, VOCABULARY)
    told(fresh, 0, end)
    mine, theirs = (one.draft(text[end], 4, allowance) for one in (drafter, fresh))
    assert mine.tokens == theirs.tokens and mine.tree == theirs.tree
    assert torch.allclose(torch.tensor(mine.shares[1:]), torch.tensor(theirs.shares[1:]), atol=1e-5)
    one, other = (d._cache.rows(0, d._cache.length) for d in (drafter, fresh))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


def test_a_level_sees_its_own_path_alone(tmp_path):
    """A node's probabilities are those of its path read as text with the fed-back states."""
    engine = eagle_3(tmp_path, tiny("llama"))
    model = engine.follower.model
    drafter = Eagle(model, CONTEXT, VOCABULARY)
    rows = torch.randn(5, HIDDEN), torch.randn(5, 2, HIDDEN)
    drafter.observe(Features([5, 9, 13, 7, 30], *rows))
    found = drafter.draft(8, 3, Allowance(40, WHOLE))
    parents, children = found.tree.parents, {}
    for node, parent in enumerate(parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    deep = next(n for n in children if n and parents[n] > 0)
    path = [deep]
    while parents[path[0]] > 0:
        path.insert(0, parents[path[0]])
    states, tokens, out = model.fused(*rows), [9, 13, 7, 30, 8], torch.empty(0)
    cache = model.cache(CONTEXT)
    for node in [0, *path]:
        if node:
            states = torch.cat([states, out[-1:]])
            tokens.append(found.tokens[node])
        cache.length = 0
        places = torch.arange(len(tokens))
        out, scores = model(states, torch.tensor(tokens), places, None, cache)
    ids = {int(token): place for place, token in enumerate(model.ids)}
    for child in children[deep]:
        expected = scores[-1, ids[found.tokens[child]]].exp()
        assert found.shares[child] == pytest.approx(float(expected), abs=1e-4)


def test_tokens_beyond_the_vocabulary_are_never_drafted(tmp_path):
    engine = eagle_3(tmp_path, tiny("llama"))
    drafter = Eagle(engine.follower.model, CONTEXT, 10)
    drafter.observe(Features(PROMPT, torch.randn(9, HIDDEN), torch.randn(9, 2, HIDDEN)))
    found = drafter.draft(3, 4, Allowance(20, WHOLE))
    assert len(found.tokens) > 1 and max(found.tokens[1:]) < 10
