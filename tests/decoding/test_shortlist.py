"""The shortlist: drafts of few tokens, the text of all."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.engines import TREES, decode, engine_of, tokens
from support.families import VOCABULARY, tiny
from support.graphs import both_ways, settings_of
from support.native_engines import lay_out, made_native
from support.shortlists import LISTED, shortened

from medusa_chat.checkpoints.head_weights import heads_of, tensors_of
from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest
from medusa_chat.paths import asset
from medusa_chat.training.calibration import Greedy, _search
from medusa_chat.training.loss import shortlist
from medusa_chat.trees.calibration import Calibration
from medusa_chat.trees.shapes import cartesian

ROOTS = torch.tensor([5])


def drafted(engine, tree, **settings):
    """The tokens of every step's draft but its root."""
    asked = GenerationSettings(drafter="medusa", seed=0, nodes=len(tree))
    events = decode(engine, drafter=engine.drafter(asked, tree), **settings)
    steps = [event.draft for event in events if isinstance(event, Step)]
    return [(draft.tokens[1:], draft.draft_probabilities[1:]) for draft in steps]


@pytest.mark.parametrize("family", ["llama", "gemma", "cohere", "gpt2", "granite"])
def test_drafts_hold_its_tokens_alone_and_the_text_is_the_same(family):
    engine, whole = shortened(family), engine_of(tiny(family))
    for temperature in (0.0, 0.8):
        wanted = tokens(whole, temperature=temperature)
        for tree in TREES.values():
            asked = GenerationSettings(drafter="medusa", nodes=len(tree), seed=1)
            drafter = engine.drafter(asked, tree)
            assert tokens(engine, drafter=drafter, temperature=temperature) == wanted
    tree = next(tree for tree in TREES.values() if tree.width <= len(LISTED) and len(tree) > 3)
    found = drafted(engine, tree)
    assert found and {token for ids, _ in found for token in ids} <= set(LISTED)
    assert {t for ids, _ in drafted(whole, tree) for t in ids} - set(LISTED)
    assert all(0 < share <= 1 for _, shares in found for share in shares)


def test_c_drafts_what_torch_drafts(library):
    ours, twin = shortened("llama", library), shortened("llama")
    for tree in TREES.values():
        for settings in ({}, {"temperature": 0.8}):
            mine, its = drafted(ours, tree, **settings), drafted(twin, tree, **settings)
            assert [ids for ids, _ in mine] == [ids for ids, _ in its]
            for (_, a), (_, b) in zip(mine, its, strict=True):
                assert a == pytest.approx(b, abs=1e-5)


def test_a_tree_wider_than_the_list_drafts_from_all(library):
    tree = next(tree for tree in TREES.values() if tree.width > 1)
    for known in (None, library):
        model = tiny("llama")
        if known is not None:
            lay_out(model, known)
        engine = engine_of(model)
        assert engine.heads.shorten([5], engine.backbone.lm_head)
        if known is not None:
            engine = made_native(engine, library)
        assert {token for ids, _ in drafted(engine, tree) for token in ids} - {5}


def test_the_captured_step_drafts_from_it_too():
    engine, tree = shortened("llama"), cartesian(3, 2)
    found, _ = both_ways(engine, tree, settings_of())
    drafted = {token for event in found[1:-1] for token in event.draft.tokens[1:]}
    assert drafted and drafted <= set(LISTED)


def with_own_heads(engine, one_lm=False, mapped=False):
    """Heads with LM heads of their own, whose logits are distinct from the backbone's."""
    torch.manual_seed(3)
    rows = 30 if mapped else VOCABULARY
    hidden = engine.backbone.config.hidden_size
    own = MedusaHeads(4, hidden, vocabulary=rows, one_lm=one_lm)
    for part in (own.weight, own.lm_weight):
        torch.nn.init.normal_(part)
    if mapped:
        own.token_map, own.vocabulary = torch.randperm(VOCABULARY)[:rows], VOCABULARY
    return own.requires_grad_(False)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("one_lm", [False, True])
def test_lm_heads_of_their_own_read_its_rows_alone(one_lm, mapped):
    engine, tree = engine_of(tiny("llama")), cartesian(3, 2)
    wanted = tokens(engine)
    engine.heads = own = with_own_heads(engine, one_lm, mapped)
    hidden = torch.randn(1, own.bias.shape[-1])
    before, size = own(hidden, ROOTS, engine.backbone.lm_head)[:, 0], own.lm_weight.numel()
    assert own.shorten(LISTED, engine.backbone.lm_head) and own.short is None
    assert own.lm_weight.numel() == size
    listed = set(LISTED) if not mapped else set(LISTED) & set(own.token_map.tolist())
    logits, names = own.draft_logits(hidden, ROOTS, engine.backbone.lm_head, 2, 3)
    assert set(names.tolist()) == listed and logits.shape == (2, len(listed))
    assert torch.allclose(logits, before[:2, names], atol=1e-5)
    assert torch.allclose(own(hidden, ROOTS, engine.backbone.lm_head)[:, 0], before, atol=1e-5)
    again = heads_of(tensors_of(own)).to(own.bias)
    again.vocabulary = VOCABULARY
    assert torch.allclose(again(hidden, ROOTS, engine.backbone.lm_head)[:, 0], before, atol=1e-5)
    found = drafted(engine, tree)
    assert found and {token for ids, _ in found for token in ids} <= listed
    drafter = engine.drafter(GenerationSettings(drafter="medusa", nodes=len(tree), seed=0), tree)
    assert tokens(engine, drafter=drafter) == wanted


def test_a_token_map_is_drafted_from_as_it_is():
    engine = engine_of(tiny("llama"))
    own, hidden = (
        with_own_heads(engine, mapped=True),
        torch.randn(1, engine.backbone.config.hidden_size),
    )
    logits, names = own.draft_logits(hidden, ROOTS, engine.backbone.lm_head, 4, 3)
    assert names is own.token_map and logits.shape == (4, 30)
    whole, none = own.draft_logits(hidden, ROOTS, engine.backbone.lm_head, 4, 31)
    assert none is None and torch.allclose(whole[:, names], logits, atol=1e-5)


def test_a_token_without_a_row_is_impossible():
    heads = MedusaHeads(2, 4, vocabulary=3)
    heads.vocabulary, heads.token_map = 5, torch.tensor([0, 2, 4])
    logits = heads(torch.randn(1, 4), torch.tensor([0]), lambda x: x)
    assert torch.isfinite(logits[0, 0]).tolist() == [True, False, True, False, True]


def test_an_lm_head_of_some_tokens_says_what_the_whole_one_says():
    config = SimpleNamespace(logit_scale=0.5, final_logit_softcapping=2.0)
    whole = LogitHead(torch.nn.Linear(4, 6), config)
    chosen, x = torch.tensor([1, 4]), torch.randn(3, 4)
    assert torch.allclose(whole.rows(chosen)(x), whole(x)[:, chosen])


def test_a_quantised_lm_head_and_tokens_that_no_head_has_are_left_alone():
    engine = engine_of(tiny("llama"))
    own = with_own_heads(engine, mapped=True)
    missing = sorted(set(range(VOCABULARY)) - set(own.token_map.tolist()))
    assert not own.shorten(missing, engine.backbone.lm_head)
    logits, names = own.draft_logits(torch.randn(1, own.bias.shape[-1]), ROOTS, None, 4, 3)
    assert len(names) == 30 and logits.shape == (4, 30)
    engine.backbone.lm_head.linear.weight = torch.nn.Parameter(
        torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False
    )
    assert not engine.heads.shorten(LISTED, engine.backbone.lm_head)


def test_it_holds_the_fewest_tokens_that_make_up_most_answers():
    often = [[token] * 100 for token in range(300)]
    rare = [[token] for token in range(300, 900)]
    found = shortlist([*often, *rare], 4096)
    assert len(found) == 512 and set(range(295)) <= set(found)
    assert list(found) == sorted(found)
    assert shortlist([*often, *rare], 1000) == ()  # over half of the vocabulary
    assert shortlist([[token] for token in range(300)], 4096) == ()  # seen too seldom
    assert shortlist([], 4096) == ()


def test_a_load_says_what_drafts_are_taken_from(tmp_path):
    import shutil

    folder = tmp_path / "demo"
    shutil.copytree(asset("demo"), folder, ignore=shutil.ignore_patterns("*.py", "draft"))
    file = folder / "medusa_calibration.json"
    values = json.loads(file.read_text("utf-8"))

    def notes(listed):
        file.write_text(json.dumps(values | {"shortlist": listed}), "utf-8")
        *_, (_, loaded) = load(LoadRequest(str(folder), precision="fp32", device="cpu"))
        return " ".join(loaded.info.notes), loaded.engine.heads

    said, heads = notes(list(range(1000)))
    assert "drafts are taken from 1,000 of 4,096 tokens" in said and len(heads.shortlist) == 1000
    said, heads = notes([3, 4096])
    assert "shortlist is ignored" in said and heads.short is None
    said, heads = notes([])
    assert "drafts are taken" not in said and heads.short is None
    said, heads = notes(list(range(2049)))
    assert "over half of the vocabulary" in said and heads.short is None


@pytest.mark.parametrize("listed", ['["x"]', "[Infinity]", "[1.5]", "[true]", '"12"', '{"5": 1}'])
def test_a_shortlist_that_is_none_is_refused(tmp_path, listed):
    file = tmp_path / "medusa_calibration.json"
    file.write_text(f'{{"accuracies": [[0.5]], "choices": [[0]], "shortlist": {listed}}}', "utf-8")
    with pytest.raises(ModelError, match="is not a valid calibration"):
        Calibration.read(file)
    file.write_text('{"accuracies": [[0.5]], "choices": [[0]], "shortlist": [7, 3, 7]}', "utf-8")
    assert Calibration.read(file).shortlist == (3, 7)


@pytest.mark.parametrize("kept", [(), (5, 9)])
def test_calibrate_keeps_a_shortlist_or_makes_the_first_one(kept):
    stored = Calibration(((0.5,),), Tree.from_choices([(0,)]), shortlist=kept)
    loaded = SimpleNamespace(
        engine=engine_of(tiny("llama")),
        info=SimpleNamespace(heads=3),
        calibration=stored if kept else None,
    )
    loaded.engine.backbone.vocabulary = 4096
    answers = [Greedy([1], list(range(256)) * 16, [(0, 0, 0)] * 8)]
    found = _search(loaded, answers, 4, "here").shortlist
    assert found == (kept or tuple(range(256)))


def test_train_writes_it():
    calibrated = Calibration(((0.5,),), ((0,),), "here", 1, shortlist=(3, 7))
    assert calibrated.to_json()["shortlist"] == (3, 7)
    assert "shortlist" not in Calibration(((0.5,),), ((0,),), "here", 1).to_json()
