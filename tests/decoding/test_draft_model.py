"""A draft model: the text stays plain decoding's, its cache follows the text, what it proposes."""

import math
import random
from dataclasses import replace

import pytest
import torch
from support.engines import NEW, PROMPT, decode, draft_model, engine_of, tokens
from support.families import VOCABULARY, tiny

from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.budget import CREDIT, SHARE, Allowance, Budget, PassCost, StepTimes
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.errors import UsageError
from medusa_chat.runtime.traces import from_json, to_json
from medusa_chat.trees.shapes import chain

LONG = 48


def noisy(noise: float, family: str = "llama"):
    """A draft model that agrees with the backbone of that family the less, the more noise."""
    model = tiny(family)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    return draft_model(model)


def with_draft(noise: float, backend=None):
    engine = engine_of(tiny("llama"))
    if backend is not None:
        engine.backend = backend(engine.backbone)
    engine.follower = noisy(noise)
    return engine


def drafting(engine, nodes=6, name="draft", budget=None):
    return engine.drafter(GenerationSettings(name, nodes=nodes), ROOT, budget, kinds.DRAFT)


def rate(events) -> float:
    return events[-1].stats.acceleration_rate


@pytest.mark.parametrize("name", ["draft", "auto"])
@pytest.mark.parametrize("noise", [0.0, 0.15, 5.0])
def test_the_text_is_plain_decodings_however_right_the_draft_is(noise, name):
    engine = with_draft(noise)
    rates = []
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "max_new_tokens": LONG}
        plain = tokens(engine, **options)
        for nodes in (2, 5, 16):
            events = decode(engine, drafter=drafting(engine, nodes, name), **options)
            assert list(events[-1].token_ids) == plain
            rates.append(rate(events))
    assert noise or name == "auto" or min(rates[:3]) >= 2 - 1 / NEW, (
        "of the same weights the greedy chain is right"
    )
    assert noise != 0.15 or 1.2 < max(rates[:3]) < 6, "neither all is right nor nothing"


@pytest.mark.parametrize("noise", [0.0, 0.15, 5.0])
def test_its_cache_is_that_of_a_fresh_prefill(noise):
    engine = with_draft(noise)
    draft = engine.follower
    tokens(engine, drafter=drafting(engine, 8), max_new_tokens=LONG)
    cache, held = draft._backbone.cache, draft._backbone.cache.length
    assert draft.length >= held >= len(PROMPT)
    assert engine._ids == draft._ids
    kept = [block.clone() for block in cache.rows(0, held)]
    fresh = noisy(noise)
    fresh._backbone.run_chunk(torch.tensor(draft._ids[:held]))
    for ours, theirs in zip(kept, fresh._backbone.cache.rows(0, held), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_it_follows_a_conversation_that_others_drafted_too():
    """Turns by it, by plain decoding, of an edited text and of one from its beginning."""
    engine = with_draft(0.15)
    text = list(PROMPT)
    for turn, name in enumerate(("draft", "none", "draft", "none", "draft", "draft")):
        drafter = drafting(engine, 6) if name == "draft" else None
        said = tokens(engine, text, drafter=drafter, max_new_tokens=6)
        assert said == tokens(engine_of(tiny("llama")), text, max_new_tokens=6)
        text = [*text[: len(text) - 4 * (turn == 2)], *said, 7] if turn != 3 else [*PROMPT, 3]
    draft, root = engine.follower, 9
    fresh = noisy(0.15)
    fresh.observe(Features(list(draft._ids)))
    free = Allowance(8, "")
    ours, theirs = draft.draft(root, 6, free), fresh.draft(root, 6, free)
    assert ours.tokens == theirs.tokens
    assert ours.shares[1:] == pytest.approx(theirs.shares[1:], abs=1e-4)
    engine.forget()
    assert draft.length == 0 == draft._backbone.cache.length


def test_it_follows_two_conversations_that_take_turns():
    engine, plain = engine_of(tiny("llama"), context=768), engine_of(tiny("llama"), context=768)
    engine.follower = noisy(0.15)
    one = [1, *random.Random(5).choices(range(3, VOCABULARY - 1), k=70)]
    other = [1, *random.Random(6).choices(range(3, VOCABULARY - 1), k=70)]
    for turn in range(4):
        text = (one, other)[turn % 2]
        first, *_, last = decode(engine, text, drafting(engine, 6), max_new_tokens=6)
        assert (first.reused_tokens > 60) == (turn > 1)
        assert engine.follower._ids == engine._ids
        plain.forget()
        assert list(last.token_ids) == tokens(plain, text, max_new_tokens=6)
        text += [*last.token_ids, 7]


def test_shares_are_its_own_probabilities_and_siblings_need_no_pass():
    draft, model = noisy(0.0), tiny("llama")
    draft.observe(Features(PROMPT[:-1]))
    made = draft.draft(PROMPT[-1], 9, Allowance(6, ""))
    chain = [node for node in range(len(made.tree)) if made.tree.ranks[node] == 0]
    assert made.passes == pytest.approx(len(chain) + 0.25 * (len(PROMPT) - 1))
    path = list(PROMPT)
    for node in chain:
        siblings = [n for n in range(1, len(made.tree)) if made.tree.depths[n] == len(path) - 8]
        logits = model(torch.tensor([path])).logits[0, -1]
        expected = logits.softmax(-1).topk(4)
        assert [made.tokens[n] for n in siblings] == expected.indices.tolist()
        got = [made.shares[n] for n in siblings]
        assert got == pytest.approx(expected.values.tolist(), abs=1e-5)
        path.append(made.tokens[node])


def test_a_draft_is_no_longer_than_its_nodes_the_context_and_its_time_allow():
    draft = noisy(0.0)
    draft.observe(Features(PROMPT))
    assert len(draft.draft(5, 9, Allowance(2, "")).tree) == 5, "one pass finds the only node"
    assert draft.draft(5, 2, Allowance(16, "")).tree.depth == 2
    costs = tuple(1 + 0.1 * n for n in range(16))
    dear = Allowance(16, "", costs, 1.0, per_pass=0.95)
    assert draft.draft(5, 9, dear).tree.depth == 1
    assert draft.draft(5, 9, replace(dear, per_pass=0.0)).tree.depth > 1
    short = draft_model(tiny("llama"), context=len(PROMPT) + 2)
    short.observe(Features(PROMPT))
    assert short.draft(5, 9, Allowance(16, "")).tree.depth == 1
    short.observe(Features([5, 6, 7]))
    assert len(short.draft(5, 9, Allowance(16, "")).tree) == 1, "its context is full"


def test_tokens_that_one_of_the_two_does_not_have_are_neither_read_nor_proposed():
    for rows in (VOCABULARY - 8, VOCABULARY + 8):
        draft = draft_model(tiny("llama", vocab_size=rows))
        draft.observe(Features([VOCABULARY - 1] * 3))
        made = draft.draft(VOCABULARY - 1, 4, Allowance(16, ""))
        assert max(made.tokens) < VOCABULARY


def test_a_step_s_record_says_what_the_draft_model_proposed():
    engine = with_draft(0.15)
    events = decode(engine, drafter=drafting(engine, 6, "auto"), max_new_tokens=LONG)
    steps = [event for event in events if isinstance(event, Step)]
    seen = {source for step in steps for source in step.draft.sources}
    assert {None, "draft"} <= seen <= {None, "draft", "text", "draft and text"}
    for step in steps:
        assert from_json(to_json(step)) == step
        for source, share in zip(step.draft.sources, step.draft.draft_probabilities, strict=True):
            assert (share is None) == (source in (None, "text"))
            assert share is None or 0 <= share <= 1


@pytest.mark.parametrize("backend", [None, CudaGraphStep], ids=["by torch", "recorded"])
def test_what_follows_the_text_is_told_every_row_of_it_once(backend):
    """A drafter that reads states gets those of a fresh prefill, whoever ran the steps before."""

    class Reader:
        kind, reads_states = kinds.DRAFT, True

        def __init__(self):
            self.ids, self.rows = [], torch.empty(0, 32)

        @property
        def length(self):
            return len(self.ids)

        def crop(self, length):
            self.ids, self.rows = self.ids[:length], self.rows[:length]

        def observe(self, features):
            assert len(features.tokens) == len(features.final)
            self.ids = [*self.ids, *features.tokens]
            self.rows = torch.cat([self.rows, features.final.float()])

        def draft(self, root, depth, allowance):
            tree = chain(min(depth, 2))
            dice = [self.ids[-1], root, *(random.randrange(VOCABULARY) for _ in range(9))]
            return Candidates(tree, [root, *dice[: len(tree) - 1]], [math.nan, *[0.5] * 9])

    engine = engine_of(tiny("llama"))
    if backend is not None:
        engine.backend = backend(engine.backbone)
    engine.follower = reader = Reader()
    text = list(PROMPT)
    for name in ("draft", "none", "draft"):
        drafter = drafting(engine, 3) if name == "draft" else None
        said = tokens(engine, text, drafter=drafter, max_new_tokens=12)
        assert said == tokens(engine_of(tiny("llama")), text, max_new_tokens=12)
        text = [*text, *said, 7]
    expected = engine_of(tiny("llama")).backbone.run_chunk(torch.tensor(reader.ids))
    assert reader.ids == engine._ids
    assert torch.allclose(reader.rows, expected, atol=1e-4)


@pytest.mark.parametrize("right", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("per_pass", [0.1, 0.4, 2.0])
def test_a_draft_model_costs_no_more_than_its_credit(right, per_pass):
    """Whatever is accepted, and the more it is, the more is gained."""
    dice = random.Random(1)
    times = StepTimes([1 + 0.1 * n for n in range(80)])
    budget = Budget(times, PassCost(per_pass))
    budget.begin(tuple(range(1, 17)), True)
    spent = given = 0.0
    for _ in range(400):
        allowed = budget.allow()
        passes, nodes, accepted, is_right = 0, 1, 1, True
        while passes < allowed.nodes - 1 and (
            not passes or allowed.pays(0.7 ** (passes + 1), passes + 1)
        ):
            passes, nodes = passes + 1, nodes + 1
            is_right &= dice.random() < right
            accepted += is_right
        spent += 1 + 0.1 * (nodes - 1) + per_pass * passes
        given += accepted
        said = sum(0.7**n for n in range(1, nodes))
        budget.record(nodes, accepted, nodes > 1, accepted, said, passes)
    assert spent <= (1 + SHARE) * given + CREDIT
    if right == 0.95 and per_pass == 0.1:
        assert given > 1.5 * spent


def test_without_a_draft_model_one_is_asked_for():
    with pytest.raises(UsageError, match="--draft"):
        drafting(engine_of(tiny("llama")))
