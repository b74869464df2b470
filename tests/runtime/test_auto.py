"""What `--tree auto` and the budget do in whole answers: the text is plain decoding's."""

from dataclasses import replace

import pytest
from support.checkpoints import write_checkpoint
from support.step_costs import times_of

from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.paths import asset
from medusa_chat.runtime.reply import reply, resolve
from medusa_chat.runtime.requests import Reply
from medusa_chat.trees.auto_tree import auto_tree, source_tree


def loaded_from(folder):
    return list(load(LoadRequest(str(folder), precision="fp32", device="cpu")))[-1][1]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return loaded_from(write_checkpoint(tmp_path_factory.mktemp("auto") / "model"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return loaded_from(write_checkpoint(tmp_path_factory.mktemp("bare") / "model", heads=0))


def fresh(loaded, per_node: float):
    """The model as just loaded, with costs that no step changes."""
    loaded.times = times_of(per_node)
    loaded.engine.times = None
    loaded.budgets.clear()
    loaded.engine.forget()
    loaded.said = ()
    return loaded


def test_a_step_drafts_from_twice_the_nodes_that_pay_on_average():
    for per_node, least in ((2.0, 4), (0.01, 5)):
        auto = auto_tree(None, 4, times_of(per_node), is_cut=True)
        assert auto.nodes >= least and len(auto.expected) == auto.nodes
        assert auto.tree.depth == source_tree(None, 4).head(auto.nodes).depth
        assert auto.nodes < len(auto.tree) <= 2 * auto.nodes


def test_a_recorded_tree_has_the_nodes_that_should_pay():
    auto = auto_tree(None, 4, times_of(0.02), is_cut=False)
    assert len(auto.tree) == auto.nodes == len(auto.expected) > 1
    assert auto_tree(None, 4, times_of(2.0), is_cut=False).nodes == 1


def test_too_many_nodes_are_refused():
    with pytest.raises(UsageError, match="give at most"):
        auto_tree(None, 3, times_of(0.1), True, 200)


def test_explicit_nodes_and_trees_are_left_alone(shared):
    loaded = fresh(shared, 2.0)
    for asked, nodes in ((GenerationSettings(nodes=7), 7), (GenerationSettings(tree="chain-3"), 4)):
        settings, drafter = resolve(loaded, asked)
        assert settings.nodes == nodes == len(drafter.plan([1, 2], 50).tree), "no budget cuts it"


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_p": 0.9}])
@pytest.mark.parametrize("drafter", ["medusa", "auto"])
def test_decoding_by_a_budget_says_what_plain_decoding_says(shared, settings, drafter):
    """Random heads are as hostile as it gets; drafts shrink, the text is the same."""
    loaded = fresh(shared, 0.02)
    asked = GenerationSettings(max_new_tokens=80, seed=5, **settings)
    text = "the same words, and the same words again"
    plain = list(reply(loaded, Reply(text, replace(asked, drafter="none"))))
    medusa = list(reply(loaded, Reply(text, replace(asked, drafter=drafter))))
    assert medusa[-1].token_ids == plain[-1].token_ids
    steps = [event for event in medusa if isinstance(event, Step)]
    assert all(step.nodes == len(step.draft.tokens) for step in steps)
    assert all(step.nodes == 1 for step in plain if isinstance(step, Step))
    assert plain[-1].learnt is None and medusa[-1].learnt.costs[0] == 1.0


def test_typical_acceptance_keeps_its_tree_for_its_text_depends_on_it(shared):
    loaded = fresh(shared, 0.02)
    asked = GenerationSettings(acceptance="typical", temperature=0.7, max_new_tokens=60, seed=5)
    steps = [e for e in reply(loaded, Reply("some words", asked)) if isinstance(e, Step)]
    assert {step.nodes for step in steps} == {loaded.info.nodes}


@pytest.mark.parametrize(("cost", "most"), [(3.0, 1), (0.01, 16)])
def test_without_heads_the_text_drafts_what_pays(bare, cost, most):
    """Where a node costs three plain steps nothing is drafted."""
    loaded = fresh(bare, cost)
    asked = GenerationSettings(max_new_tokens=60, seed=5)
    text = "the same words, and the same words, and the same words, and"
    plain = list(reply(loaded, Reply(text, replace(asked, drafter="none"))))
    looked = list(reply(loaded, Reply(text, asked)))
    assert looked[-1].token_ids == plain[-1].token_ids
    steps = [event.nodes for event in looked if isinstance(event, Step)]
    assert max(steps) == most if most == 1 else 4 < max(steps) <= most


def test_chains_of_recorded_steps_keep_one_length(bare, monkeypatch):
    loaded = fresh(bare, 3.0)
    monkeypatch.setattr(loaded.engine.backend, "tries", 3, raising=False)
    settings, drafter = resolve(loaded, GenerationSettings())
    assert len(drafter.plan([7] * 9, 50).tree) == settings.nodes == 16, "whatever a node costs"


@pytest.mark.parametrize(("cost", "nodes"), [(2.0, 6), (0.01, 11), (0.001, 32)])
def test_a_drafters_own_tree_has_the_nodes_that_cost_little(cost, nodes, monkeypatch):
    """Where steps are recorded: a budget cuts the others."""
    request = LoadRequest(drafts=(str(asset("demo/draft")),), precision="fp32", device="cpu")
    loaded = fresh(list(load(request))[-1][1], cost)
    monkeypatch.setattr(loaded.engine.backend, "tries", 3, raising=False)
    asked = GenerationSettings(drafter="draft")
    assert resolve(loaded, asked)[0].nodes == 6, "each level is a pass of its own"
    assert resolve(loaded, replace(asked, nodes=9))[0].nodes == 9
    monkeypatch.setattr(kinds, "DRAFT", kinds.EAGLE)  # as if it were another drafter
    assert resolve(loaded, asked)[0].nodes == nodes


def test_every_step_teaches_what_steps_cost(shared):
    """In `generate` and on the page alike: there is no other place where they are timed."""
    loaded = fresh(shared, 0.02)
    loaded.engine.times = loaded.times
    list(reply(loaded, Reply("some words", GenerationSettings(max_new_tokens=60, seed=5))))
    assert loaded.times.count > 10 and 0 < loaded.times.plain_seconds < 1


@pytest.mark.parametrize(("asked", "nodes"), [(None, 16), (1, 1), (6, 6)])
def test_prompt_lookup_has_its_own_length(shared, asked, nodes):
    """Heads that do not pay are no reason against the text."""
    settings = GenerationSettings(drafter="prompt-lookup", nodes=asked)
    assert resolve(fresh(shared, 2.0), settings)[0].nodes == nodes
