"""Two draft models: the text stays plain decoding's, their trees become one, which counts more."""

import pytest
import torch
from support.engines import PROMPT, decode, draft_model, engine_of, tokens
from support.families import tiny

from medusa_chat.decoding.budget import Allowance, Budget, PassCost, StepTimes
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.drafters.pair import LEAST, Pair
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.runtime.traces import from_json, to_json

LONG = 48


def noisy(noise: float, seed: int):
    """A draft model that agrees with the backbone the less, the more noise."""
    model = tiny("llama")
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.data.add_(noise * weight.std() * torch.randn_like(weight))
    return draft_model(model)


class Scripted:
    """Proposes one tree: of [(parent, token, share)], whatever the text is."""

    kind, reads_states, taps, length = kinds.DRAFT, False, (), 0

    def __init__(self, nodes, passes=1.0):
        self.nodes, self.passes = nodes, passes

    def crop(self, length): ...

    def observe(self, features): ...

    def draft(self, root, depth, allowance):
        self.allowance = allowance
        parents, given, shares = zip(*self.nodes, strict=True)
        ranks, seen = [-1], {}
        for parent in parents:
            ranks.append(seen.setdefault(parent, 0))
            seen[parent] += 1
        tree = Tree((-1, *parents), tuple(ranks))
        return Candidates(tree, [root, *given], [float("nan"), *shares], self.passes)


def by_path(found):
    """The shares and the sources of the nodes by the tokens of their paths."""
    paths = [tuple(found.tokens[at] for at in path[1:]) for path in found.tree.paths]
    nodes = zip(found.shares, found.sources, strict=True)
    return dict(zip(paths, nodes, strict=True))


ONE = [(0, 5, 0.6), (0, 6, 0.2), (1, 7, 0.9)]
OTHER = [(0, 6, 0.4), (0, 8, 0.3), (1, 9, 0.8)]


def test_nodes_of_both_are_one_and_have_the_mean_of_their_probabilities():
    pair = Pair(Scripted(ONE, 2.0), Scripted(OTHER, 3.0), cost=0.5)
    found = pair.draft(1, 9, Allowance(16, "", per_pass=0.2))
    assert found.passes == 2.0 + 0.5 * 3.0
    assert pair.second.allowance.per_pass == pytest.approx(0.1)
    nodes = by_path(found)
    del nodes[()]
    assert nodes == {
        (5,): (pytest.approx(0.3), "first draft"),
        (6,): (pytest.approx(0.3), "both drafts"),
        (8,): (pytest.approx(0.15), "second draft"),
        (5, 7): (pytest.approx(0.9), "first draft"),  # the other has not read it
        (6, 9): (pytest.approx(0.8), "second draft"),
    }
    assert found.sources[0] is None and sorted(found.tree.ranks) == [-1, 0, 0, 0, 1, 2]


def test_the_one_that_was_right_counts_more_and_the_other_still_a_little():
    for right, limit in ((5, 1 - LEAST), (8, LEAST)):
        pair = Pair(Scripted(ONE), Scripted(OTHER), 1.0)
        for _ in range(200):
            pair.draft(1, 9, Allowance(16, ""))
            pair.observe(Features([1]))
            pair.draft(right, 9, Allowance(16, ""))
            pair.observe(Features([right]))
        assert pair.weight == pytest.approx(limit)


def test_what_only_one_has_read_and_another_text_teach_nothing():
    pair = Pair(Scripted(ONE), Scripted(OTHER), 1.0)
    pair.draft(1, 9, Allowance(16, ""))
    pair.observe(Features([1, 6]))
    pair.draft(9, 9, Allowance(16, ""))  # behind 6, where the second model alone had looked
    weight = pair.weight
    assert weight == pytest.approx(0.5 + (0.2 / 0.6 - 0.5) / 32)
    pair.observe(Features([3, 5, 5]))
    pair.draft(5, 9, Allowance(16, ""))
    assert pair.weight == weight


@pytest.mark.parametrize("noise", [(0.0, 5.0), (0.15, 0.15), (5.0, 5.0)])
@pytest.mark.parametrize("name", ["draft", "auto"])
def test_the_text_is_plain_decodings_however_right_the_drafts_are(name, noise):
    engine = engine_of(tiny("llama"))
    engine.follow(Pair(noisy(noise[0], 3), noisy(noise[1], 4), 1.0))
    rates = []
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "max_new_tokens": LONG}
        plain = tokens(engine, **options)
        for nodes in (2, 5, 16):
            settings = GenerationSettings(name, nodes=nodes)
            drafter = engine.drafter(settings, ROOT, None, kinds.DRAFT)
            events = decode(engine, drafter=drafter, **options)
            assert list(events[-1].token_ids) == plain
            rates.append(events[-1].stats.acceleration_rate)
    assert noise[0] or max(rates[:3]) > 3, "the first is always right"


def test_both_follow_a_conversation_that_others_drafted_too():
    engine, text = engine_of(tiny("llama")), list(PROMPT)
    engine.follow(Pair(noisy(0.15, 3), noisy(0.3, 4), 1.0))
    for turn, name in enumerate(("draft", "none", "draft", "none", "draft", "draft")):
        drafter = None
        if name == "draft":
            drafter = engine.drafter(GenerationSettings(name, nodes=6), ROOT, None, kinds.DRAFT)
        said = tokens(engine, text, drafter=drafter, max_new_tokens=6)
        assert said == tokens(engine_of(tiny("llama")), text, max_new_tokens=6)
        text = [*text[: len(text) - 4 * (turn == 2)], *said, 7] if turn != 3 else [*PROMPT, 3]
    pair = engine.follower
    assert pair.first._ids == pair.second._ids == engine._ids
    engine.forget()
    assert pair.length == 0 == pair.second.length


def test_a_budget_cuts_their_tree_and_a_record_says_which_proposed_what():
    engine = engine_of(tiny("llama"))
    engine.follow(Pair(noisy(0.15, 3), noisy(0.15, 4), 0.8))
    budget = Budget(StepTimes([1 + 0.02 * n for n in range(80)]), PassCost(0.05))
    budget.begin(tuple(range(1, 17)), True)
    drafter = engine.drafter(GenerationSettings("auto"), ROOT, budget, kinds.DRAFT)
    events = decode(engine, drafter=drafter, max_new_tokens=LONG)
    assert list(events[-1].token_ids) == tokens(engine, max_new_tokens=LONG)
    steps = [event for event in events if isinstance(event, Step)]
    seen = {source for step in steps for source in step.draft.sources}
    assert {None, "both drafts"} < seen and any("draft" in (one or "") for one in seen)
    for step in steps:
        assert from_json(to_json(step)) == step
        for source, share in zip(step.draft.sources, step.draft.draft_probabilities, strict=True):
            assert (share is None) == (source in (None, "text"))
