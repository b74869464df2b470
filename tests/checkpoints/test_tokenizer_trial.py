"""A tokenizer that would end the process, or never end, is refused before it is used."""

import json
import multiprocessing

import pytest
from support.checkpoints import write_checkpoint
from support.tokenizers import byte_fallback_tokenizer, byte_tokenizer

from medusa_chat import paths
from medusa_chat.checkpoints import tokenizer_trial
from medusa_chat.checkpoints.tokenizer import read_tokenizer
from medusa_chat.checkpoints.tokenizer_trial import TokenizerTrial
from medusa_chat.cli.main import main
from medusa_chat.errors import ModelError
from medusa_chat.runtime import worker

BYTES = json.loads(byte_tokenizer().backend_tokenizer.to_str())


def split_by(expression):
    cut = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    both = [cut | {"invert": False}, BYTES["pre_tokenizer"]]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": both}}


def replace_empty(kind):
    return {"normalizer": {"type": "Replace", "pattern": {kind: ""}, "content": "x"}}


def with_prefix(prefix):
    return {"model": BYTES["model"] | {"continuing_subword_prefix": prefix, "merges": [["a", "b"]]}}


BROKEN = {
    "an expression that goes back": (split_by(r"(a+)+$|(\s+)+x{2}"), "fails at 24 times 'a' and"),
    "an empty expression replaced": (replace_empty("Regex"), "fails at 1 times"),
    "a part without its kind": (
        {"normalizer": {"pattern": {"String": ""}, "content": "x"}},
        "fails at 1 times",
    ),
    "a part whose kind is escaped": (
        {"normalizer": replace_empty("Regex")["normalizer"] | {"type": "Repl@ce"}},
        "fails at 1 times",
    ),
    "a table that is none": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "when it is read",
    ),
    "a broken table": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}},
        "fails at 1 times",
    ),
    "a long prefix": (with_prefix("#" * 13), "when it is read"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_tokenizer_that_panics_is_refused_in_one_line(kind, tmp_path):
    change, said = BROKEN[kind]
    text = json.dumps(BYTES | change).replace("@", r"\u0061")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=said) as error:
        TokenizerTrial(tmp_path).refuse()
    assert "\n" not in str(error.value)


def test_one_that_takes_for_ever_is_stopped(tmp_path):
    """By the cube of a text's length, which the library's own limit for a match does not find."""
    slow = split_by(r"(?:\w*\w*)[\x{4e00}-\x{9fff}]\d")
    (tmp_path / "tokenizer.json").write_text(json.dumps(BYTES | slow))
    with pytest.raises(ModelError, match="takes too long at 2048 times"):
        TokenizerTrial(tmp_path).refuse()


def test_a_machine_too_busy_to_tell_is_not_called_a_malicious_tokenizer(tmp_path, monkeypatch):
    byte_fallback_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(tokenizer_trial, "PATIENCE", 0.01)
    with pytest.raises(ModelError, match="not checked within .* when the machine is less") as error:
        TokenizerTrial(tmp_path).refuse()
    assert "malicious" not in str(error.value)


def test_both_load_and_inspect_refuse_it(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "model", heads=0)
    (folder / "tokenizer.json").write_text(json.dumps(BYTES | replace_empty("Regex")))
    for command in (["generate", "--prompt", "a", "--checkpoint"], ["inspect"]):
        assert main([*command, str(folder)]) == 4
        out = "".join(capsys.readouterr())
        assert "fails at 1 times 'a'" in out and "panicked" not in out


@pytest.mark.parametrize(
    "change",
    [
        {"model": BYTES["model"] | {"vocab": {"a": -1}}},
        {"model": BYTES["model"] | {"merges": [["a", "no token"]]}},
        {"decoder": {"type": "Nope"}},
        {"added_tokens": [{"id": 0}]},
    ],
)
def test_inspect_finds_what_a_load_finds_in_plain_parts(change, tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "model", heads=0)
    (folder / "tokenizer.json").write_text(json.dumps(BYTES | change))
    with pytest.raises(ModelError, match="the tokenizer in .* is broken"):
        read_tokenizer(folder)
    assert main(["inspect", str(folder)]) == 4
    assert "fails when it is read" in capsys.readouterr().out


def test_a_tokenizer_of_plain_parts_needs_no_process_and_others_pass(tmp_path):
    byte_fallback_tokenizer().save_pretrained(tmp_path)
    trial = TokenizerTrial(tmp_path)
    assert trial._child is not None
    trial.refuse()
    (tmp_path / "tokenizer.json").write_text(json.dumps(BYTES))
    assert TokenizerTrial(tmp_path)._child is None


def test_one_that_passed_is_not_tried_again_until_it_changes(tmp_path):
    byte_fallback_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    first = TokenizerTrial(tmp_path)
    first.refuse()
    assert TokenizerTrial(tmp_path)._child is None
    file.write_bytes(file.read_bytes() + b"\n")
    changed = TokenizerTrial(tmp_path)
    assert changed._child is not None
    changed.close()
    assert TokenizerTrial(tmp_path)._child is not None, "closed before its end: not passed"


def test_one_that_failed_is_tried_again(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(BYTES | replace_empty("Regex")))
    for _ in range(2):
        with pytest.raises(ModelError, match="fails at 1 times"):
            TokenizerTrial(tmp_path).refuse()


@pytest.mark.parametrize("content", ["", "{}", "[1, null]", "\x00"])
def test_a_broken_list_of_those_that_passed_is_none(content, tmp_path):
    byte_fallback_tokenizer().save_pretrained(tmp_path)
    paths.write_text(paths.cache_dir() / tokenizer_trial.PASSED, content)
    trial = TokenizerTrial(tmp_path)
    assert trial._child is not None
    trial.refuse()
    assert TokenizerTrial(tmp_path)._child is None


def test_a_trial_that_is_closed_leaves_no_process(tmp_path):
    byte_fallback_tokenizer().save_pretrained(tmp_path)
    trial = TokenizerTrial(tmp_path)
    child = trial._child
    trial.close()
    assert child.poll() is not None


def test_a_panic_is_the_error_of_its_message_and_the_worker_goes_on():
    from tokenizers import Tokenizer

    broken = Tokenizer.from_str(json.dumps(BYTES | replace_empty("Regex")))

    class Panicking:
        def handle(self, request, stop):
            yield broken.encode(request).ids

    ours, theirs = multiprocessing.Pipe()
    end = worker._carry_out(theirs, Panicking(), "hello")
    assert isinstance(end.error, ModelError) and not end.is_last
    assert "the tokenizer of this model fails on this text" in str(end.error)
    assert not ours.poll()
