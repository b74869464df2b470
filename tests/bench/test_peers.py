"""The study "peers": every program on the same questions, or the reason why not. No figure of this
file is a measurement."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_models import tiny_model, write_gguf

from medusa_chat.bench import peers
from medusa_chat.bench.answers import Question, Run
from medusa_chat.bench.peers import OURS, PLAIN, Peer, PeerFailed, ask, write_as_bf16

ASKED = [Question([1, 2, 3], ""), Question([4, 5], "")]
FAKE = """
class Llama:
    def __init__(self, model, n_ctx, n_threads, n_threads_batch, verbose):
        if model.endswith("bad"):
            raise ValueError("no such model")
        assert n_ctx >= 3 + 6
        self.resets = 0
    def reset(self):
        self.resets += 1
    def generate(self, ids, temp, repeat_penalty):
        assert temp == 0
        yield from [*ids[::-1], 255, 7]
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A Python in whose environment there is a llama_cpp."""
    (tmp_path / "llama_cpp.py").write_text(FAKE, "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Path(sys.executable)


def test_without_peers_there_are_our_figures_and_the_reasons(study, monkeypatch):
    monkeypatch.setattr(peers, "DTYPES", ("float32",))
    monkeypatch.setattr(peers, "no_compiler", lambda device: "there is no compiler")
    rows = study("peers", questions=2)
    own = [*OURS, "transformers, float32", "transformers, float32, prompt lookup"]
    for name in own:
        assert rows[name]["value"] > 0 and rows[name]["against"] == PLAIN
        assert rows[f"{name}: same tokens"]["value"] == 1, name
    assert rows[PLAIN]["ratio"] == 1
    reasons = {name: row["note"] for name, row in rows.items() if row["value"] is None}
    assert reasons["transformers, float32, static and compiled"].endswith("there is no compiler")
    assert "--llama-cpp PYTHON and a GGUF file" in reasons["llama.cpp"]
    assert "--vllm PYTHON" in reasons["vLLM, bf16, eager"]
    assert "--no-root" in reasons["vLLM, bf16, eager, exported heads"]
    assert "without the prompt" in rows[PLAIN]["note"]


def test_our_drafters_are_timed_alone(study):
    rows = list(study("drafters", questions=2).values())
    assert [row["name"] for row in rows[:4]] == [*OURS] and rows[0]["ratio"] == 1
    same = [row["value"] for row in rows if row["name"].endswith("same tokens")]
    assert same == [1] * len(OURS)


def test_a_peer_answers_in_its_own_process(context, python, tmp_path):
    runs, versions = ask(context, Peer("x", "llama.cpp", python, tmp_path), ASKED, 1, tmp_path)
    assert len(runs) == 2 * context.rounds and versions == ""
    first, second = runs[:2]
    assert (first.question, first.tokens, first.stepped) == (ASKED[0], (3, 2, 1), 3)
    assert (second.tokens, second.steps) == ((5, 4), 2)
    assert all(run.seconds > 0 for run in runs)


def test_a_peer_that_fails_says_its_last_line(context, python, tmp_path):
    for peer, why in (
        (Peer("x", "llama.cpp", python, tmp_path / "bad"), "ValueError: no such model"),
        (Peer("x", "llama.cpp", tmp_path / "none"), "does not start"),
        (Peer("x", "llama.cpp", None), "needs --llama-cpp PYTHON"),
        (Peer("x", "vllm", python, why="no heads"), "no heads"),
    ):
        with pytest.raises(PeerFailed, match=why):
            ask(context, peer, ASKED, 1, tmp_path)


def test_the_fastest_answer_counts_and_only_questions_that_all_answered():
    def made(question, tokens, seconds):
        return Run(question, tokens, len(tokens), float(len(tokens)), seconds)

    found = {
        PLAIN: [made(ASKED[0], (1, 2, 3, 4), 4.0), made(ASKED[1], (1, 2), 1.0)],
        "other": [made(ASKED[0], (1, 2, 9), 1.0), made(ASKED[0], (1, 2, 9), 0.5)],
    }
    rows = {row["name"]: row for row in peers._rows(ASKED, found, {"other": "other 1.0"})}
    assert rows[PLAIN]["value"] == 1 and rows["other"]["value"] == 6
    assert rows["other"]["ratio"] == 6 and rows["other"]["note"].startswith("other 1.0; ")
    assert rows["other: same tokens"]["value"] == 0.5


@pytest.mark.parametrize("split", [0, 5])
def test_a_gguf_file_in_bf16_has_the_same_metadata_and_weights(split, tmp_path):
    whole = write_gguf(tmp_path / "small.gguf", tiny_model(), "Q8_0")
    file = write_gguf(tmp_path / "parts.gguf", tiny_model(), "Q8_0", split=split)
    before = gguf.GGUFReader(whole)
    after = gguf.GGUFReader(write_as_bf16(file, tmp_path / "b.gguf"))
    told = {n: f.contents() for n, f in before.fields.items() if not n.startswith("GGUF.")}
    again = {n: f.contents() for n, f in after.fields.items() if not n.startswith("GGUF.")}
    assert json.dumps(told | {"general.file_type": 32}) == json.dumps(
        again | {"general.file_type": 32}
    )
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert one.name == other.name
        values = gguf.dequantize(one.data, one.tensor_type)
        kept = gguf.dequantize(other.data, other.tensor_type)
        wanted = gguf.GGMLQuantizationType.BF16
        rounded = (
            gguf.dequantize(gguf.quantize(values, wanted), wanted) if values.ndim > 1 else values
        )
        assert np.array_equal(kept, rounded)
