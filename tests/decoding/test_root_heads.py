"""Heads that read the root: the token that is certain when they draft."""

import pytest
import torch
from support.engines import PROMPT, TREES, decode, engine_of, tokens
from support.families import VOCABULARY, tiny
from support.graphs import both_ways, settings_of
from support.native_engines import lay_out, made_native
from support.shortlists import LISTED

from medusa_chat.checkpoints.head_weights import heads_of, tensors_of
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import ModelError
from medusa_chat.trees.shapes import cartesian

TREE = cartesian(3, 2)


def root_engine(family="llama", library=None, is_short=False, dtype=torch.float32):
    """An engine whose random heads read the root."""
    model = tiny(family).to(dtype)
    if library is not None:
        lay_out(model, library)
    engine = engine_of(model)
    heads = MedusaHeads(4, model.config.hidden_size, dtype=dtype, has_root=True)
    torch.manual_seed(2)
    for part in (heads.weight, heads.root_weight):
        torch.nn.init.normal_(part, std=0.3)
    engine.heads = heads.requires_grad_(False)
    heads.read_roots(model.get_input_embeddings())
    if is_short:
        assert heads.shorten(LISTED, engine.backbone.lm_head)
    return engine if library is None else made_native(engine, library)


def medusa(engine, tree):
    return engine.drafter(GenerationSettings(drafter="medusa", nodes=len(tree), seed=0), tree)


def drafts(engine, tree):
    events = decode(engine, drafter=medusa(engine, tree), max_new_tokens=24)
    return [event.draft.tokens for event in events if isinstance(event, Step)]


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen2", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_plain_decodings(family, temperature):
    engine = root_engine(family)
    wanted = tokens(engine_of(tiny(family)), temperature=temperature)
    for tree in TREES.values():
        assert tokens(engine, drafter=medusa(engine, tree), temperature=temperature) == wanted


@pytest.mark.parametrize("is_short", [False, True])
def test_c_drafts_what_torch_drafts(library, is_short):
    ours, twin = root_engine(library=library, is_short=is_short), root_engine(is_short=is_short)
    for tree in TREES.values():
        assert drafts(ours, tree) == drafts(twin, tree)


def test_the_captured_step_drafts_the_same():
    both_ways(root_engine(), TREE, settings_of())


def test_a_draft_follows_from_the_root():
    engine = root_engine()
    heads, hidden = engine.heads, torch.randn(1, engine.backbone.config.hidden_size)
    lm_head = engine.backbone.lm_head
    first, second = (heads(hidden, torch.tensor([root]), lm_head) for root in (3, 7))
    assert not torch.allclose(first, second)
    embedding = engine.backbone.model.get_input_embeddings().weight
    embedding.data *= 5  # models differ in the size of their embeddings
    torch.testing.assert_close(heads(hidden, torch.tensor([3]), lm_head), first)


def test_a_peek_asks_a_head_after_the_same_root():
    engine = root_engine()
    text = [*PROMPT, *tokens(engine)[:3]]
    state = engine.backbone
    for root in (4, 9):
        _, found = engine.peek(text, [root], head=2)
        engine.forget()
        hidden = state.run_chunk(torch.tensor(text))[-1:]
        wanted = engine.heads(hidden, torch.tensor([root]), state.lm_head)[1, 0]
        engine.forget()
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    logits, alone = engine.peek(text, [], head=1)
    _, likely = engine.peek(text, [int(logits.argmax())], head=1)
    torch.testing.assert_close(alone, likely, atol=1e-4, rtol=1e-4)


def test_they_are_written_and_read_whole():
    heads = root_engine().heads
    found = heads_of(tensors_of(heads))
    assert torch.equal(found.root_weight, heads.root_weight)
    assert torch.equal(found.weight, heads.weight) and found.embed is None
    missing = {n: t for n, t in tensors_of(heads).items() if n != "2.root.weight"}
    with pytest.raises(ModelError, match="3 of 4 read the root"):
        heads_of(missing)


def test_heads_without_layers_can_read_it_too():
    heads = MedusaHeads(2, 8, layers=0, vocabulary=VOCABULARY, has_root=True)
    found = heads_of(tensors_of(heads))
    assert found.root_weight is not None and found.weight.shape[0] == 0
