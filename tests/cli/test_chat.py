"""`medusa-chat chat`: what a conversation in the terminal says, forgets and keeps."""

import io
import json
import runpy
import signal
import sys
import threading

import pytest
from support.scripted import ScriptedRunner

from medusa_chat.cli import chat
from medusa_chat.cli.main import main

STORY, TEA = "Tell me a story about a fox", "How do I make tea?"


def talk(monkeypatch, capsys, *lines, options=()):
    """(what was answered, what was told beside it) after these lines."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", "--temperature", "0", *options]) == 0
    return capsys.readouterr()


def test_it_answers_as_generate_does_with_the_same_messages(monkeypatch, capsys, tmp_path):
    said = talk(monkeypatch, capsys, STORY, TEA).out
    file, first = tmp_path / "messages.json", []
    for text in (STORY, TEA):
        first.append({"role": "user", "content": text})
        file.write_text(json.dumps(first))
        assert main(["generate", "--messages", str(file)]) == 0
        answer = capsys.readouterr().out
        assert said.startswith(answer)
        said = said[len(answer) :]
        first.append({"role": "assistant", "content": answer.removesuffix("\n")})
    assert said == ""


@pytest.fixture
def scripted(monkeypatch):
    """What answers instead of a model: it keeps the prompts, and can be slow."""
    runner = ScriptedRunner(delay=0.001, prefill=0, steps=12)
    monkeypatch.setattr(chat, "InProcess", lambda: runner)
    return runner


def roles(prompt):
    return "".join(one["role"][0] for one in prompt)


def test_commands_change_what_is_remembered_and_are_not_sent(scripted, monkeypatch, capsys):
    lines = ("/regen", "one", "two", "/undo", "three", " ", "/regen", "/new", "four", "/quit", "5")
    told = talk(monkeypatch, capsys, *lines, options=["--system", "Be short."]).err
    assert [roles(prompt) for prompt in scripted.prompts] == ["su", "suau", "suau", "suau", "su"]
    asked = [prompt[-1]["content"] for prompt in scripted.prompts]
    assert asked == ["one", "two", "three", "three", "four"]
    assert told.count("there is no answer to regenerate") == 1


def test_a_message_that_begins_as_a_command_is_sent(scripted, monkeypatch, capsys):
    lines = ("/etc/hosts: what is it?", "/new sletter")
    talk(monkeypatch, capsys, *lines)
    assert [prompt[-1]["content"] for prompt in scripted.prompts] == list(lines)


def test_help_and_unknown_commands_are_answered_by_the_program(scripted, monkeypatch, capsys):
    told = talk(monkeypatch, capsys, "/help", "/hlep").err
    assert scripted.prompts == [] and told.count(chat.HELP) == 3 and "no /hlep" in told


def test_a_models_own_sampling_stands_under_a_preset_and_both_under_options(
    scripted, monkeypatch, capsys, tmp_path
):
    scripted.sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (tmp_path / "mine.toml").write_text('system = "Be short."\ntop_p = 0.5\ntop_k = 7\n')
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/defaults\nagain\n"))
    assert main(["chat", "--preset", str(tmp_path / "mine.toml"), "--top-k", "3"]) == 0
    first, second = scripted.settings
    assert (first.temperature, first.top_p, first.top_k) == (0.6, 0.5, 3)
    assert (second.temperature, second.top_p, second.top_k) == (0.6, 0.9, 20)
    assert scripted.prompts[0][0] == {"role": "system", "content": "Be short."}
    assert "model's defaults: temperature 0.6, top-p 0.9, top-k 20" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_keeps_what_it_said(scripted, monkeypatch, capsys):
    scripted.delay, scripted.steps = 0.05, 400
    stop = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    stop.start()
    said = talk(monkeypatch, capsys, "a long one", "/undo").out
    stop.join()
    assert 1 < len(said.split()) < 400 and len(scripted.prompts) == 1
    scripted.delay, scripted.steps = 0.001, 4
    talk(monkeypatch, capsys, "one", "two")
    assert roles(scripted.prompts[-1]) == "uau"


def test_a_closed_input_is_its_end(scripted, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat"]) == 0 and "Traceback" not in capsys.readouterr().err


def test_a_message_that_does_not_fit_is_told_and_forgotten(monkeypatch, capsys):
    told = talk(monkeypatch, capsys, "word " * 3000, TEA, options=["--max-context", "128"])
    assert "medusa-chat: " in told.err and "Here is how to make tea" in told.out


def test_what_the_context_has_no_room_for_is_told(monkeypatch, capsys):
    options = ["--max-context", "160", "--max-new-tokens", "40"]
    told = talk(monkeypatch, capsys, *[STORY, TEA] * 3, options=options)
    assert "oldest messages were left out" in told.err
    assert told.out.count("Here is how to make tea") == 3


@pytest.mark.parametrize(("system", "keys"), [("win32", "Ctrl-Z, Enter"), ("linux", "Ctrl-D")])
def test_the_help_names_the_keys_that_end_the_input_here(monkeypatch, system, keys):
    monkeypatch.setattr(sys, "platform", system)
    assert f"/quit or {keys} quits" in runpy.run_path(chat.__file__)["HELP"]


def test_reasoning_is_told_beside_the_answer_and_kept_apart(scripted, monkeypatch, capsys):
    scripted.pieces = ("<think>\n", "Hm, \x1b]0;x", "\n</think>\n", "\nYes", *[" it is"] * 60)
    told = talk(monkeypatch, capsys, "one", "two")
    assert told.out.startswith("Yes it is") and "Hm" not in told.out and "think" not in told.out
    assert told.err.count("Hm, ") == 2
    (_, said, _) = scripted.prompts[1]
    assert said["content"] == told.out.partition("\n")[0] and said["reasoning"].startswith("Hm, ")
