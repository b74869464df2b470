"""Recorded passes give what operators give, for any tree; on a CPU the body is called."""

import logging
import random
from types import SimpleNamespace

import pytest
import torch
from support import eagle_files
from support.adopted import adopt_split_attention
from support.engines import PROMPT, engine_of, on
from support.fake_device import fake_device
from support.families import VOCABULARY, tiny
from support.followers import HIDDEN, followed, texts, write
from support.graphs import assert_same, settings_of
from support.operators import Operators
from support.recorded_steps import step_of

from medusa_chat.checkpoints.eagle_weights import read_eagle
from medusa_chat.checkpoints.prepare import try_cuda_graphs
from medusa_chat.decoding.backends import recorded_pass, split_attention
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.backends.recorded_pass import ASKED, RecordedPass, RecordedPasses
from medusa_chat.decoding.draft import Draft, TreeTensors
from medusa_chat.decoding.drafters.eagle import Eagle
from medusa_chat.decoding.step import TorchStep
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.trees.shapes import cartesian

CPU = torch.device("cpu")


def any_tree(dice, nodes):
    parents = [-1, *(dice.randrange(node) for node in range(1, nodes))]
    ranks = [-1, *(parents[1:node].count(parents[node]) for node in range(1, nodes))]
    return Tree(tuple(parents), tuple(ranks))


def drafts(dice, sizes, device=CPU):
    for nodes in sizes:
        ids = torch.tensor([dice.randrange(VOCABULARY) for _ in range(nodes)], device=device)
        yield Draft(ids, TreeTensors.of(any_tree(dice, nodes), device))


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed", "gemma3", "gpt2"])
def test_a_recording_gives_what_operators_give_for_any_tree_and_text(family):
    backbone, dice = engine_of(tiny(family)).backbone, random.Random(1)
    recorded, plain = RecordedPasses(backbone), TorchStep(backbone)
    with torch.inference_mode():
        backbone.run_chunk(torch.tensor(PROMPT))
        for draft in drafts(dice, [5, 8, 6, 7, 5, 1, 1, 1, 1, 13, 16, 9, 10, 33, 40, 64, 35]):
            wanted = [part.clone() for part in plain.run(draft)]
            found = recorded.run(draft)
            for one, other in zip(found, wanted, strict=True):
                assert torch.allclose(one, other, atol=1e-4)
            backbone.cache.keep(draft.tree.paths[-1])
    assert {rows for rows, *_ in recorded._made} == {1, 8, 16, 64}


def followed_by_eagle(folder):
    tensors = eagle_files.eagle_3(HIDDEN, VOCABULARY, taps=2)
    settings = eagle_files.config(eagle_aux_hidden_state_layer_ids=[1, 1])
    engine = followed(tiny("llama"), write(folder, tensors, settings), read_eagle, Eagle)
    engine.backend = CudaGraphStep(engine.backbone)
    return engine


def test_a_drafter_that_reads_states_gets_those_of_the_recording(tmp_path):
    one, other = (followed_by_eagle(tmp_path / name) for name in "ab")
    other.backend = TorchStep(other.backbone)
    steps = [texts(engine, "eagle", nodes=7, max_new_tokens=24) for engine in (one, other)]
    assert steps[0] == steps[1]
    assert one.backend.by_pass.seconds > 0
    cached = [engine.follower._cache.rows(0, 20) for engine in (one, other)]
    for ours, theirs in zip(*cached, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert all(is_tapped for *_, is_tapped in one.backend.by_pass._made)
    assert texts(other, max_new_tokens=24) == steps[0]


@pytest.mark.parametrize("asked", [{"frequency_penalty": 0.5}, {"temperature": 0.8}])
def test_answers_whose_logits_are_read_have_recorded_passes(asked):
    """Those with a penalty or with log probabilities: the same text, and the same numbers."""
    engine, settings = engine_of(tiny("llama")), settings_of(**asked)
    logprobs, found = None if "frequency_penalty" in asked else 3, []
    for way in (TorchStep(engine.backbone), CudaGraphStep(engine.backbone)):
        engine = on(engine, way)
        engine.forget()
        drafter = engine.drafter(settings, ROOT)
        found.append(list(engine.generate(PROMPT, drafter, settings, logprobs=logprobs)))
    assert_same(found[1], found[0])
    assert engine.backend.by_pass.seconds > 0 == engine.backend.seconds


@pytest.mark.parametrize("fault", [RuntimeError("not permitted"), torch.OutOfMemoryError("full")])
def test_what_cannot_be_recorded_runs_by_operators_and_says_so_once(monkeypatch, caplog, fault):
    def refused(self):
        raise fault

    monkeypatch.setattr(RecordedPass, "body", refused)
    backbone, dice = engine_of(tiny("llama")).backbone, random.Random(1)
    recorded, plain = RecordedPasses(backbone), TorchStep(backbone)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        backbone.run_chunk(torch.tensor(PROMPT))
        for draft in drafts(dice, [4] * (ASKED + 2)):
            assert torch.equal(recorded.run(draft)[1], plain.run(draft)[1])
    assert len(caplog.messages) == 1 and str(fault) in caplog.messages[0]


def test_a_load_leaves_passes_that_give_other_results_to_operators(monkeypatch):
    real, backbone = RecordedPass.body, engine_of(tiny("llama")).backbone
    chosen, why = try_cuda_graphs(backbone, None)
    assert not chosen.by_pass._is_over and not why

    def body(self):
        real(self)
        self.logits = -self.logits

    monkeypatch.setattr(RecordedPass, "body", body)
    chosen, why = try_cuda_graphs(backbone, None)
    assert isinstance(chosen, CudaGraphStep) and chosen.by_pass._is_over and not why


def test_a_few_passes_of_a_size_are_not_recorded():
    backbone, dice = engine_of(tiny("llama")).backbone, random.Random(1)
    recorded = RecordedPasses(backbone)
    with torch.inference_mode():
        backbone.run_chunk(torch.tensor(PROMPT))
        for draft in drafts(dice, [3] * (ASKED - 1)):
            recorded.run(draft)
    assert not recorded._made


# The same on a device that stands for a GPU.


def made_on(family, **options):
    """A recorded pass of 8 rows, and a draft of 6."""
    backbone = step_of(family, cartesian(3, 2), **options)._backbone
    capture = SimpleNamespace(recorded=lambda body: body)
    tokens = torch.zeros(6, dtype=torch.long)
    draft = Draft(tokens, TreeTensors.of(cartesian(2, 1, 1), tokens.device))
    assert len(draft.tree) <= 8
    return RecordedPass(capture, backbone, 8, 80), draft


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed", "gemma3", "gpt2"])
@pytest.mark.parametrize("is_split", [False, True])
def test_no_pass_waits_for_the_device_or_leaves_it(monkeypatch, family, is_split):
    launched = adopt_split_attention(monkeypatch) if is_split else {}
    name = split_attention.NAME if is_split else "medusa_tree"
    with fake_device():
        made, draft = made_on(family, implementation=name)
        made.body()
        assert made.logits.shape == (8, VOCABULARY) and made.logits.device == draft.tokens.device
    assert not is_split or launched["split"] == 2


def test_a_tree_costs_a_pass_no_kernel_that_grows_with_it():
    """What is copied into a recording: a dozen kernels, for any number of nodes and layers."""
    counts = []
    for nodes in (2, 8):
        backbone, dice = engine_of(tiny("llama")).backbone, random.Random(1)
        recorded = RecordedPasses(backbone)
        with torch.inference_mode():
            backbone.run_chunk(torch.tensor(PROMPT))
            made = list(drafts(dice, [nodes] * (ASKED + 2)))
            for draft in made[:-1]:
                recorded.run(draft)
            recorded._last._replay = lambda: None
            with Operators() as operators:
                recorded.run(made[-1])
        counts.append(operators.found.total())
    assert counts[0] <= counts[1] <= 32, counts


def test_rows_are_those_of_the_products_tiles():
    assert recorded_pass.ROWS == tuple(2**n for n in range(9))
