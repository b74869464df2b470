"""The baseline by transformers, with a draft model. No figure of this file is a measurement."""

from dataclasses import replace

import pytest
from support.checkpoints import write_checkpoint
from support.families import tiny

from medusa_chat.bench import hf_baseline
from medusa_chat.bench.answers import Question
from medusa_chat.bench.context import read_model
from medusa_chat.errors import UsageError


def test_a_draft_model_beside_the_backbone_is_found_and_does_not_disturb_it(context, tmp_path):
    folder = write_checkpoint(tmp_path / "model", heads=1)
    tiny("llama", vocab_size=256, hidden_size=16).save_pretrained(folder / hf_baseline.DRAFT_FOLDER)
    request = replace(context.request, checkpoint=str(folder))
    other = replace(context, request=request, loaded=read_model(request, lambda message: None))
    draft = hf_baseline.read_draft(other, "float32")
    assert draft is not None and draft.config.hidden_size == 16
    assert other.loaded.engine.backbone.config.hidden_size == 32


def test_a_draft_model_of_another_vocabulary_is_refused(context, tmp_path):
    tiny("llama", vocab_size=128).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="vocabulary of 128 tokens and the backbone one of 256"):
        hf_baseline.read_draft(replace(context, draft=tmp_path), "float32")
    with pytest.raises(UsageError, match="is not a model folder"):
        hf_baseline.read_draft(replace(context, draft=tmp_path / "absent"), "float32")


def test_a_draft_models_settings_are_given_back():
    draft = tiny("llama")
    before = draft.generation_config.to_dict()
    with hf_baseline.drafting(draft, 3) as options:
        assert options["assistant_model"].generation_config.num_assistant_tokens == 3
    assert draft.generation_config.to_dict() == before


def test_a_stock_answer_leaves_the_pass_over_the_prompt_out(context):
    asked = Question([5, 9, 13, 20], "")
    found, seconds = hf_baseline.read_baseline(context, "float32").answer(asked)
    assert found.steps == found.stepped == 5  # of 6 tokens the first pass gives one
    assert len(found.tokens) == 6 and 0 < found.seconds < seconds


def test_no_compiler_is_said_in_words(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no no-such-compiler" in hf_baseline.no_compiler("cpu (x)")
