"""Studies with a draft model, and those that train. No figure of this file is a measurement."""

import json
from dataclasses import replace

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.families import tiny

from medusa_chat.bench import run
from medusa_chat.bench.harness import hf_baseline
from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.studies import head_training, training_fixture
from medusa_chat.checkpoints.load import load
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.training.data import Example

WORDS = "the cat sat on a mat and the dog ran to see it there again".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("studies") / "model", heads=5)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = []
    for place in range(9):
        said = " ".join(WORDS[place:] + WORDS[:place])
        conversation = [
            ("user", said[:20]),
            ("assistant", said),
            ("user", "more"),
            ("assistant", said),
        ]
        rows.append({"messages": [{"role": role, "content": text} for role, text in conversation]})
    found = tmp_path_factory.mktemp("data") / "data.jsonl"
    found.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return found


@pytest.fixture
def context(folder, data):
    *_, (_, loaded) = load(request(folder))
    return BenchContext(request(folder), loaded, "auto", 1, 8, lambda message: None, data=data)


def request(folder):
    return LoadRequest(str(folder), device="cpu", precision="fp32")


def study(folder, name, **options):
    result = run(
        request(folder),
        rounds=1,
        max_new_tokens=14,
        tree="auto",
        progress=lambda message: None,
        studies=[name],
        **options,
    )
    return {row["name"]: row for row in result["rows"]}


def test_a_draft_model_that_is_the_model_is_right_in_every_token(folder):
    rows = study(folder, "assisted", draft=folder)
    for length in range(1, 9):
        found = rows[f"draft of {length}"]
        assert found["unit"] == "tokens/step" and found["max"] <= length + 1
    # 14 tokens: 4 of the first pass, which reads the prompt, then 4, 4 and the 2 that are left
    assert rows["draft of 3"]["value"] == pytest.approx(10 / 3)
    for name in ("draft of 1", "draft of 8", "medusa"):
        assert rows[f"{name}: overhead"]["value"] > 0
        assert rows[f"{name}: speed"]["against"] == "transformers generate"
    assert rows["transformers generate: speed"]["ratio"] == 1


def test_without_a_draft_model_the_row_says_so(folder):
    assert "--draft" in study(folder, "assisted")["assisted generation"]["note"]


def test_a_draft_model_beside_the_backbone_is_found_and_does_not_disturb_it(tmp_path):
    folder = write_checkpoint(tmp_path / "model", heads=1)
    tiny("llama", vocab_size=256, hidden_size=16).save_pretrained(folder / hf_baseline.DRAFT_FOLDER)
    *_, (_, loaded) = load(request(folder))
    context = BenchContext(request(folder), loaded, "auto", 1, 8, lambda message: None)
    found = hf_baseline.read_draft(context, "float32")
    assert found is not None and found.config.hidden_size == 16
    assert loaded.engine.backbone.config.hidden_size == 32


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
    found = hf_baseline.read_baseline(context, "float32").answer([5, 9, 13, 20])
    assert found.steps == found.stepped == 7  # of 8 tokens the first pass gives one
    assert len(found.tokens) == 8 and 0 < found.stepping < found.seconds


def test_no_compiler_is_said_in_words(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no no-such-compiler" in hf_baseline.no_compiler("cpu (x)")


def small(monkeypatch):
    monkeypatch.setattr(head_training, "SEEDS", (0,))
    monkeypatch.setattr(
        head_training, "MEDUSA_1", replace(head_training.MEDUSA_1, steps=3, batch_labels=16)
    )
    monkeypatch.setattr(head_training, "JOINT_STEPS", 2)
    monkeypatch.setattr(head_training, "DIRECT_STEPS", 2)
    monkeypatch.setattr(training_fixture, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(training_fixture, "LENGTH", 64)


def test_heads_are_compared_by_lm_head_number_and_data(folder, data, monkeypatch):
    small(monkeypatch)
    rows = study(folder, "heads", data=data)
    for kind in ("training data", "self-distilled"):
        for lm_head in ("shared", "own"):
            for count in (3, 4, 5):
                found = rows[f"{kind}, {lm_head} LM head, {count} heads"]
                assert 1 <= found["value"] <= count + 1
                assert "3 steps of 16 labels" in found["note"]
    assert "the checkpoint's own 5 heads" in rows and len(rows) == 13


def test_medusa_1_leaves_the_backbone_and_medusa_2_does_not(folder, data, monkeypatch):
    small(monkeypatch)
    monkeypatch.setattr(head_training, "DIRECT_RATE", 0.05)
    rows = study(folder, "two-stage", data=data)
    before = rows["the backbone before: loss"]["value"]
    assert rows["medusa-1: loss"]["value"] == before
    assert abs(rows["medusa-2, direct: loss"]["value"] - before) > 1e-4
    assert rows["medusa-2, two stages: loss"]["ratio"] > 0
    assert rows["medusa-2, two stages"]["unit"] == "tokens/step"


def test_given_and_own_answers_are_to_the_same_prompts(context, tmp_path):
    fixture = training_fixture.make_fixture(context, tmp_path)
    prompts_and_answers = training_fixture.prompted_messages(fixture.learnt, each=2)
    given = fixture.given(prompts_and_answers)
    assert len(prompts_and_answers) == 12 and len(given) == 12
    model = fixture.backbone()
    own = fixture.answers(model, prompts_and_answers, (0.0,), "own")
    prompts = {example.ids[: example.is_label.index(True)] for example in given}
    assert {example.ids[: example.is_label.index(True)] for example in own} <= prompts
    assert {one.place for one in fixture.learnt}.isdisjoint(one.place for one in fixture.held_out)


def test_the_held_out_loss_is_that_of_the_labels_alone(context):
    model = training_fixture.TrainingFixture(context, (), (), None).backbone()
    example = Example((3, 4, 5, 6, 7), (False, False, True, True, False))
    with torch.no_grad():
        logits = model(torch.tensor([example.ids])).logits[0].log_softmax(-1)
    wanted = -(logits[1, 5] + logits[2, 6]) / 2
    assert training_fixture.held_out_loss(model, [example]) == pytest.approx(
        float(wanted), rel=1e-5
    )


def test_a_tree_is_judged_by_answers_that_did_not_shape_it():
    right, wrong = [[0]] * 8, [[None]] * 8
    assert training_fixture.held_out_tokens_per_step([right, right], 1) == pytest.approx(7 / 4)
    assert training_fixture.held_out_tokens_per_step([right, wrong], 1) == 1


def test_a_model_or_a_file_that_minutes_cannot_take_is_refused(context, tmp_path):
    large = replace(context.loaded.info, parameters=7_000_000_000)
    with pytest.raises(UsageError, match="7 billion parameters"):
        training_fixture.make_fixture(
            replace(context, loaded=replace(context.loaded, info=large)), tmp_path
        )
    few = tmp_path / "few.jsonl"
    few.write_text((context.data.read_text("utf-8")).split("\n")[0] + "\n", "utf-8")
    with pytest.raises(UsageError, match="holds 1 conversations"):
        training_fixture.make_fixture(replace(context, data=few), tmp_path)
