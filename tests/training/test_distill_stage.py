"""The answers of a self-distillation: they stay, whatever lies beside them."""

from medusa_chat.training.distill import ANSWERS, keep_answers


def test_each_training_keeps_answers_of_its_own(tmp_path):
    names = []
    for number in range(3):
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        (work / ANSWERS).write_text(f"of run {number}", "utf-8")
        kept = keep_answers(work, tmp_path / "heads")
        assert kept is not None and kept.read_text("utf-8") == f"of run {number}"
        names.append(kept.name)
    assert names == ["heads.answers.jsonl", "heads.2.answers.jsonl", "heads.3.answers.jsonl"]
    assert keep_answers(work, tmp_path / "heads") is None
