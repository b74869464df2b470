"""Studies with a draft model. No figure of this file is a measurement."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.families import tiny

from medusa_chat.bench.harness import hf_baseline
from medusa_chat.bench.harness.context import with_checkpoint
from medusa_chat.bench.harness.report_data import Question
from medusa_chat.bench.studies import kept_answers
from medusa_chat.errors import UsageError


def test_a_draft_model_that_is_the_model_is_right_in_every_token(study, request_of):
    rows = study("assisted", draft=Path(request_of.checkpoint), max_new_tokens=14)
    for length in range(1, 9):
        found = rows[f"draft of {length}"]
        assert found["unit"] == "tokens/step" and found["max"] <= length + 1
    # 14 tokens: 4 of the first pass, which reads the prompt, then 4, 4 and the 2 that are left
    assert rows["draft of 3"]["value"] == pytest.approx(10 / 3)
    for name in ("draft of 1", "draft of 8", "medusa"):
        assert rows[f"{name}: overhead"]["value"] > 0
        assert rows[f"{name}: speed"]["against"] == "transformers generate"
    assert rows["transformers generate: speed"]["ratio"] == 1


def test_without_a_draft_model_the_row_says_so(study):
    assert "--draft" in study("assisted")["assisted generation"]["note"]


def test_a_draft_model_beside_the_backbone_is_found_and_does_not_disturb_it(context, tmp_path):
    folder = write_checkpoint(tmp_path / "model", heads=1)
    tiny("llama", vocab_size=256, hidden_size=16).save_pretrained(folder / hf_baseline.DRAFT_FOLDER)
    found = hf_baseline.read_draft(with_checkpoint(context, folder), "float32")
    assert found is not None and found.config.hidden_size == 16
    assert context.loaded.engine.backbone.config.hidden_size == 32


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


def test_a_tree_is_judged_by_answers_that_did_not_shape_it():
    right, wrong = [[0]] * 8, [[None]] * 8
    assert kept_answers.held_out_tokens_per_step([right, right], 1) == pytest.approx(7 / 4)
    assert kept_answers.held_out_tokens_per_step([right, wrong], 1) == 1
