"""--draft: a smaller model is found, compared with the backbone and read; what is refused."""

import re
from itertools import product

import pytest
import torch
from support import dflash_files, eagle_files
from support.checkpoints import byte_tokenizer, write_checkpoint
from support.families import tiny
from support.followers import write
from support.loading import answer, loaded

from medusa_chat.checkpoints.places import shipped_folder
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError
from medusa_chat.runtime.reply import resolve
from medusa_chat.ui.page.tree_view import step_view


def write_draft(folder, tokens=256, tokenizer=None, seed=0, **sizes):
    model = tiny("llama", vocab_size=tokens, **{"num_hidden_layers": 1} | sizes)
    torch.manual_seed(seed)
    for weight in model.parameters() if seed else ():
        weight.data.add_(0.5 * weight.std() * torch.randn_like(weight))
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def backbone(tmp_path):
    return write_checkpoint(tmp_path / "model")


def write_eagle(folder, **_):
    tensors = eagle_files.eagle_3(32, 256, taps=1)
    taps = {"eagle_aux_hidden_state_layer_ids": [1]}
    return str(write(folder, tensors, eagle_files.config(**taps)))


def write_dflash(folder, **_):
    settings = dflash_files.config(32, taps=(1,))
    return str(write(folder, dflash_files.tensors(32, taps=1), settings))


def write_two(folder, **options):
    return write_draft(folder / "one", **options), write_draft(folder / "two", **options, seed=5)


@pytest.mark.parametrize(
    ("precision", "writes", "kind", "said"),
    [
        ("fp32", write_draft, kinds.DRAFT, " drafts, "),
        ("bf16", write_draft, kinds.DRAFT, " drafts, "),
        ("int8", write_draft, kinds.DRAFT, " drafts, "),
        ("bf16", write_two, kinds.DRAFT, " drafts, "),
        ("bf16", write_eagle, kinds.EAGLE, " is an EAGLE-3 drafter"),
        ("bf16", write_dflash, kinds.DFLASH, " is a DFlash drafter"),
    ],
)
def test_every_drafter_gives_plain_text(backbone, tmp_path, precision, writes, kind, said):
    written = writes(tmp_path / "draft", tokenizer=byte_tokenizer())
    drafts = (written,) if isinstance(written, str) else written
    model = loaded(backbone, precision=precision, drafts=drafts)
    assert model.info.drafts == tuple(drafts)
    assert all(any(f"{draft}{said}" in n for n in model.info.notes) for draft in drafts)
    own = [one.name for one in kinds.kinds_of(model.info.heads, model.info.beside)]
    assert kind.name in own and len(own) == 3
    for temperature in (0.0, 0.9):
        plain = answer(model, drafter="none", temperature=temperature)[-1].token_ids
        for name in (kinds.AUTO, *own):
            for nodes in (None, 5):
                given = {"drafter": name, "temperature": temperature, "nodes": nodes}
                assert answer(model, **given)[-1].token_ids == plain, given


def test_the_demo_s_draft_model_needs_no_tokenizer_and_mostly_agrees():
    folder = shipped_folder("demo") / "draft"
    model = loaded("demo", drafts=(str(folder),))
    events = answer(model, drafter="draft", nodes=6)
    assert events[-1].stats.acceleration_rate > 1.3
    assert events[0].settings["drafter"] == events[0].settings["tree"] == "draft"


def test_two_draft_models_draft_one_tree_and_its_picture_names_both(tmp_path):
    """The demo's own, and one of random weights with its vocabulary."""
    own = shipped_folder("demo") / "draft"
    model = loaded("demo", drafts=(str(own),))
    size = model.engine.backbone.vocabulary
    other = write_draft(tmp_path / "other", tokens=size)
    model = loaded("demo", drafts=(str(own), other))
    sources, letters = set(), set()
    for temperature, seed in product((0.0, 0.8), (1, 2, 3)):
        plain, events = (
            answer(model, drafter=name, nodes=12, temperature=temperature, seed=seed)
            for name in ("none", "draft")
        )
        assert events[-1].token_ids == plain[-1].token_ids
        steps = [event for event in events if isinstance(event, Step)]
        sources.update(*(step.draft.sources for step in steps))
        letters.update(*(step_view(step)["source"] for step in steps))
        if not temperature:
            assert events[-1].stats.acceleration_rate > 1.3
            assert model.engine.follower.weight > 0.5, "the one that is right counts more"
    assert {"first draft", "second draft"} <= sources
    assert {"f", "s"} <= letters <= set("-fsm")


def test_auto_tries_each_drafter_and_stays_with_the_faster_one(backbone, tmp_path):
    draft = write_draft(tmp_path / "draft", tokenizer=byte_tokenizer())
    model = loaded(backbone, drafts=(draft,))
    assert model.kind_for_auto() is kinds.MEDUSA
    for kind, gain in ((kinds.MEDUSA, 0.9), (kinds.DRAFT, 1.4)):
        budget = model.budget(kinds.AUTO, (1.0, 1.5), True, kind)
        assert model.kind_for_auto() is kind, "the one that is not known yet"
        budget._drafted, budget._given, budget._spent = 100, gain, 1.0
    assert model.kind_for_auto() is kinds.DRAFT
    settings, drafter = resolve(model, GenerationSettings())
    assert settings.drafter == "auto" and drafter.drafter is model.engine.follower
    assert resolve(model, GenerationSettings(tree="chain-3"))[1].drafter is None


def test_without_heads_auto_is_the_draft_model_or_the_text(tmp_path):
    bare = write_checkpoint(tmp_path / "bare", heads=0)
    assert resolve(loaded(bare), GenerationSettings())[0].drafter == "prompt-lookup"
    draft = write_draft(tmp_path / "draft", tokenizer=byte_tokenizer())
    assert resolve(loaded(bare, drafts=(draft,)), GenerationSettings())[0].drafter == "auto"
    with pytest.raises(MedusaChatError, match="start with --draft"):
        answer(loaded(bare), drafter="draft")


def changed_tokenizer():
    made = byte_tokenizer()
    made.add_tokens(["<other>"])
    return made


@pytest.mark.parametrize(
    ("sizes", "tokenizer", "said"),
    [
        ({"tokens": 300}, None, "has a vocabulary of 300 tokens and the backbone one of 256"),
        ({"tokens": 300}, changed_tokenizer, "has another tokenizer than the backbone"),
        ({"num_hidden_layers": 8}, byte_tokenizer, "parameters and the backbone"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused_in_one_line(
    backbone, tmp_path, sizes, tokenizer, said
):
    draft = write_draft(tmp_path / "draft", tokenizer=tokenizer and tokenizer(), **sizes)
    with pytest.raises(MedusaChatError, match=re.escape(said)) as error:
        loaded(backbone, drafts=(draft,))
    assert "--draft" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["draft", "draft"], "draft twice: give another model"),
        (["draft", "./draft"], "draft twice: give another model"),
        (["draft", "draft", "other"], "--draft is given 3 times"),
        (["draft", "eagle"], "is an EAGLE-3 drafter, which drafts alone"),
        (["eagle", "draft"], "is an EAGLE-3 drafter, which drafts alone"),
        (["draft", "changed"], "has another tokenizer than the backbone"),
    ],
)
def test_drafters_that_cannot_draft_together_are_refused_in_one_line(
    backbone, tmp_path, monkeypatch, names, said
):
    monkeypatch.chdir(tmp_path)
    for name in {"draft", "other"} & set(names):
        write_draft(tmp_path / name, tokenizer=byte_tokenizer())
    if "eagle" in names:
        write_eagle(tmp_path / "eagle")
    if "changed" in names:
        write_draft(tmp_path / "changed", tokens=300, tokenizer=changed_tokenizer())
    places = [name if "/" in name else str(tmp_path / name) for name in names]
    with pytest.raises(MedusaChatError, match=re.escape(said)) as error:
        loaded(backbone, drafts=tuple(places))
    assert "--draft" in str(error.value) and "\n" not in str(error.value)


def test_a_draft_model_that_is_not_there_is_named(backbone, tmp_path):
    with pytest.raises(MedusaChatError, match="nowhere"):
        loaded(backbone, drafts=(str(tmp_path / "nowhere"),))
