"""The study "vllm": every program on the same questions, or the reason why not. No figure of this
file is a measurement."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from medusa_chat.bench import vllm
from medusa_chat.bench.answers import Question
from medusa_chat.bench.drafters import OURS, PLAIN
from medusa_chat.bench.vllm import PeerFailed, Vllm, ask
from medusa_chat.decoding.drafters import kinds

ASKED = [Question([1, 2, 3], ""), Question([4, 5], "")]
FAKE = """
from types import SimpleNamespace as Found
class SamplingParams:
    def __init__(self, temperature, max_tokens, stop_token_ids):
        assert temperature == 0 and max_tokens == 6
def TokensPrompt(prompt_token_ids):
    return prompt_token_ids
class LLM:
    def __init__(self, model, **options):
        if model.endswith("bad"):
            raise ValueError("no such model")
        assert options["max_model_len"] >= 3 + 6
    def get_metrics(self):
        return []
    def generate(self, prompts, settings, use_tqdm):
        times = Found(first_token_ts=1.0, last_token_ts=2.5)
        tokens = [*prompts[0][::-1], 255]
        yield Found(outputs=[Found(token_ids=tokens)], metrics=times)
"""


@pytest.fixture
def with_vllm(context, tmp_path, monkeypatch):
    """The context with a Python in whose environment there is a vllm."""
    (tmp_path / "vllm.py").write_text(FAKE, "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return replace(context, vllm=Path(sys.executable))


def test_without_vllm_there_are_the_other_figures_and_the_reasons(study, monkeypatch):
    monkeypatch.setattr(vllm, "DTYPES", ("float32",))
    monkeypatch.setattr(vllm, "no_compiler", lambda device: "there is no compiler")
    rows = study("vllm", questions=2)
    beside = [n for n, d in OURS.items() if kinds.BY_NAME.get(d, kinds.NONE).has_own_tree]
    ours = [name for name in OURS if name not in beside]
    own = [*ours, "transformers, float32", "transformers, float32, prompt lookup"]
    for name in own:
        assert rows[name]["value"] > 0 and rows[name]["against"] == PLAIN
        assert rows[f"{name}: same tokens"]["value"] == 1, name
    assert rows[PLAIN]["ratio"] == 1
    reasons = {name: row["note"] for name, row in rows.items() if row["value"] is None}
    assert reasons["transformers, float32, static and compiled"].endswith("there is no compiler")
    assert "--vllm PYTHON" in reasons["vLLM, bf16, eager"]
    assert "--no-root" in reasons["vLLM, bf16, eager, exported heads"]
    assert "without the prompt" in rows[PLAIN]["note"]


def test_vllm_answers_in_its_own_process(with_vllm, tmp_path):
    runs, versions = ask(with_vllm, Vllm("x", tmp_path), ASKED, 1, tmp_path)
    assert len(runs) == 2 * with_vllm.rounds and "torch" in versions
    first, second = runs[:2]
    assert first.question == ASKED[0] and first.tokens[:3] == (3, 2, 1) and first.stepped == 3
    assert second.tokens[:2] == (5, 4) and second.steps == 2
    assert all(run.seconds == 1.5 for run in runs)


def test_what_fails_says_its_last_line(with_vllm, context, tmp_path):
    for of, peer, why in (
        (with_vllm, Vllm("x", tmp_path / "bad"), "ValueError: no such model"),
        (replace(context, vllm=tmp_path / "none"), Vllm("x", tmp_path), "does not start"),
        (context, Vllm("x", tmp_path), "needs --vllm PYTHON"),
        (with_vllm, Vllm("x", tmp_path, why="no heads"), "no heads"),
    ):
        with pytest.raises(PeerFailed, match=why):
            ask(of, peer, ASKED, 1, tmp_path)
