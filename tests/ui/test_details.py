"""Details: ten facts of the loaded model, each from the model itself, and the log of its load."""

import json
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.gguf_models import tiny_model, write_gguf
from support.loading import loaded

from medusa_chat.messages import ModelInfo
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.ui.page.status import status_line

NAMES = [
    *("model", "precision", "device", "memory", "context"),
    *("drafter", "tree", "backend", "template", "licence"),
]


def details(info: ModelInfo, is_guest: bool = False) -> dict:
    return json.loads(status_line(ModelState("ready", model=info), None, is_guest))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("told") / "model")


def test_ten_facts_are_those_of_the_model_that_was_loaded(folder):
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nabout", encoding="utf-8")
    model = loaded(folder)
    line = details(model.info)
    facts = {name: text for name, text, _ in line["facts"]}
    assert list(facts) == NAMES
    assert facts["precision"] == model.info.precision and facts["device"] == model.info.device
    assert facts["drafter"] == f"Medusa, {len(model.engine.heads)} heads; Prompt lookup"
    assert facts["backend"] == model.engine.backend.name
    assert facts["template"] == ("the model's own" if model.tokenizer.chat_template else "none")
    assert facts["licence"] == "apache-2.0"
    assert line["notes"] == list(model.info.notes)


@pytest.mark.parametrize(
    ("said", "shown"), [({}, "not named in its files"), ({"general__license": "gemma"}, "gemma")]
)
def test_the_licence_of_a_gguf_file_is_what_its_header_says(said, shown, tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(), **said)
    (fact,) = [fact for fact in details(loaded(file).info)["facts"] if fact[0] == "licence"]
    assert fact[1] == shown


def test_a_guest_sees_ten_facts_without_a_folder_or_the_log():
    info = ModelInfo(
        *("/models/vicuna", "llama", "fp16", "cpu", 7, 3, 2048, "auto", 16),
        tree_reason="from /models/tree.json",
        memory_bytes=2**20,
        notes=("read from /models",),
        drafts=("/models/small", "/models/you and me/tiny"),
        beside="draft",
    )
    line = details(info, is_guest=True)
    assert [fact[0] for fact in line["facts"]] == NAMES and line["notes"] == []
    assert "/models" not in json.dumps(line) and "Draft model, small and tiny" in json.dumps(line)
