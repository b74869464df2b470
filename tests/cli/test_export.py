"""`medusa-chat export`: what it prints, and how it refuses."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_checkpoint

from medusa_chat.cli.main import main


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A backbone without heads."""
    return str(write_checkpoint(tmp_path_factory.mktemp("bare") / "model", heads=0))


def export(*words: str | Path) -> int:
    return main(["export", *map(str, words)])


def test_the_command_is_printed_for_one_gpu_and_for_several(
    whole: Path, tmp_path: Path, capsys: Any
) -> None:
    assert export("--checkpoint", whole, "--format", "vllm", tmp_path / "out put") == 0
    out, err = capsys.readouterr()
    assert err == ""
    served = next(line for line in out.splitlines() if line.startswith("  vllm serve "))
    words = shlex.split(served)
    assert words[2] == str(tmp_path / "out put" / "backbone")
    assert json.loads(words[4])["model"] == str(tmp_path / "out put")
    assert "--tensor-parallel-size N" in out and "--data-parallel-size N" in out
    assert "3 heads, drafts from 256 of 256 tokens" in out


def test_json_names_the_folder_the_backbone_and_the_words_of_the_command(
    whole: Path, tmp_path: Path, capsys: Any
) -> None:
    assert export(tmp_path / "out", "--checkpoint", whole, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(tmp_path / "out") and found["heads"] == 3
    assert found["command"][:3] == ["vllm", "serve", found["backbone"]]
    assert found["bytes"] > 0 and (found["tokens"], found["vocabulary"]) == (256, 256)


def test_the_demo_is_exported_where_no_checkpoint_is_named(tmp_path: Path, capsys: Any) -> None:
    assert export(tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["heads"] == 5 and found["tokens"] < found["vocabulary"] == 4096


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--format", "gguf"], 2, "format is 'gguf': choose one of vllm"),
        (["--checkpoint", "no/such/place"], 4, "is not a checkpoint"),
        (["--checkpoint", "BARE"], 4, "has no Medusa heads to export"),
    ],
)
def test_a_refusal_is_one_line_and_an_exit_code(
    words: list[str], code: int, says: str, bare: str, tmp_path: Path, capsys: Any
) -> None:
    assert export(tmp_path / "out", *(bare if word == "BARE" else word for word in words)) == code
    out, err = capsys.readouterr()
    assert out == "" and says in err
    assert err.startswith("medusa-chat: ") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_a_wrong_usage(whole: Path, tmp_path: Path, capsys: Any) -> None:
    assert export(tmp_path, "--checkpoint", whole) == 2
    assert "exists: give another DIR" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["export", "--checkpoint", str(whole)]) == 2  # without DIR
