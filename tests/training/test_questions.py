"""assets/heads/questions.py: a backbone's own questions, as prompts that training reads."""

import json
import runpy
import sys
from pathlib import Path

from medusa_chat.training.conversations import read_conversations

SCRIPT = Path(__file__).parents[2] / "assets/heads/questions.py"


def test_the_demo_writes_questions_that_training_reads(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "demo", "12", "--seed", "3"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    assert texts and len(texts) == len(set(texts))
    assert all(len(text.split()) >= 4 for text in texts)
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    assert [found.asked for found in read_conversations(file, prompts=True).conversations] == [
        (text,) for text in texts
    ]
