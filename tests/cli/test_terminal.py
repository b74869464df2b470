"""What a person sees of `generate` in a terminal: a pseudo-terminal here."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from medusa_chat.cli import generate
from medusa_chat.cli.main import main
from medusa_chat.cli.terminal import note
from medusa_chat.decoding.events import Finished, Prefilled, Reading, Stats, Step
from medusa_chat.messages import LoadPhase, ModelInfo, Request
from medusa_chat.runtime import runner, worker
from medusa_chat.runtime.requests import Reply

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
MODEL = ModelInfo("demo", "llama", "fp32", "cpu", 1, 3, 64, "auto", 8, "", 1, ("a note",))
FIGURES = "4 tokens, 2 steps, 1.50 tokens/step, 10.0 tokens/s, ended by eos"
CHOICES = "demo, fp32, cpu; drafter medusa, tree auto (8 nodes), seed 7"


class Scripted:
    """A runner that says "There once was a" in two steps."""

    def run(self, request: Request[Any]) -> Iterator[Any]:
        if not isinstance(request, Reply):
            yield LoadPhase("resolve")
            yield LoadPhase("download", done=5_000_000, total=10_000_000)
            yield LoadPhase("read")
            yield LoadPhase("ready", MODEL)
            return
        yield Reading(512, 1300)
        chosen = {"drafter": "medusa", "tree": "auto", "nodes": 8, "seed": 7}
        yield Prefilled("demo", "fp32", "cpu", chosen, (1,), 1, 0, (3,), "There", 0.1)
        yield Step(0, (4,), " once", 0.1, (0,))
        yield Step(1, (5, 6), " was a", 0.1, (0, 1))
        stats = Stats(4, 2, 1.5, 0.3, 0.1, 10.0)
        yield Finished("eos", (3, 4, 5, 6), "There once was a", "", stats)

    def stop(self) -> None:
        """Nothing runs beside it."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command whose stdout and stderr are one pseudo-terminal; gives what it wrote."""
    monkeypatch.setattr(generate, "InProcess", Scripted)

    def run(*argv: str) -> str:
        reader, writer = os.openpty()
        with open(reader, "rb", buffering=0) as seen:
            with open(writer, "w", encoding="utf-8") as stream, monkeypatch.context() as patched:
                patched.setattr(sys, "stdout", stream)
                patched.setattr(sys, "stderr", stream)
                assert main(argv) == 0
            return _all_of(seen).decode("utf-8").replace("\r\n", "\n")

    return run


def _all_of(terminal: Any) -> bytes:
    """What was written to a terminal that is closed: it may come in several pieces."""
    found = b""
    with suppress(OSError):  # Linux says so where there is no more
        while piece := terminal.read(65536):
            found += piece
    return found


def shown(text: str) -> list[str]:
    """The lines that stay in the terminal: of each what follows its last clearing."""
    return [line.rpartition("\r\x1b[K")[2] for line in text.split("\n")]


def test_a_terminal_shows_the_answer_and_one_line_after_it(written: Callable[..., str]) -> None:
    assert shown(written("generate", "--prompt", "x")) == ["There once was a", FIGURES, ""]


def test_a_terminal_shows_how_far_a_load_is(written: Callable[..., str]) -> None:
    line = written("generate", "--prompt", "x").split("\n")[0]
    assert "loading: read" in line and "50%  5 MB of 10 MB" in line


def test_a_terminal_shows_how_much_of_a_long_prompt_is_read(written: Callable[..., str]) -> None:
    assert "reading: 512 of 1,300 tokens\r" in written("generate", "--prompt", "x")


def test_verbose_says_what_was_chosen_before_the_answer(written: Callable[..., str]) -> None:
    lines = shown(written("generate", "--prompt", "x", "--verbose"))
    assert lines[-4:] == [CHOICES, "There once was a", FIGURES, ""]
    assert "medusa-chat: loading: read" in lines and "medusa-chat: a note" in lines


def test_every_prompt_of_a_file_has_its_answer_and_its_line(
    written: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', "utf-8")
    lines = shown(written("generate", "--prompts", str(file)))
    assert lines == [*["There once was a", FIGURES] * 2, ""]


def test_json_in_a_terminal_is_events_alone(written: Callable[..., str]) -> None:
    *lines, last = shown(written("generate", "--prompt", "x", "--json"))
    assert last == "" and len(lines) == 4 and all(line.startswith('{"event":') for line in lines)


def test_a_pipe_gets_what_it_always_got(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "InProcess", Scripted)
    assert main(["generate", "--prompt", "x"]) == 0
    assert capsys.readouterr() == ("There once was a\n", f"{CHOICES}\n{FIGURES}\n")


# ---- texts of strangers ----

UNSAFE = {*map(chr, (*range(9), *range(11, 32), *range(127, 160)))}
UNSAFE |= {*map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))}
EVIL = "".join(sorted(UNSAFE)) + "\x1b]0;owned\x07\x1b[2J"


def obeyed(text: str) -> set[str]:
    """What of it a terminal would obey, but for the clearing of our own line."""
    return UNSAFE & set(text.replace("\r\x1b[K", ""))


class Hostile(Scripted):
    """The same, with a model and an answer made to be printed."""

    def run(self, request: Request[Any]) -> Iterator[Any]:
        for value in super().run(request):
            if isinstance(value, LoadPhase):
                model = value.model and replace(value.model, notes=(f"note {EVIL}",))
                value = replace(value, note=f"from {EVIL}", model=model)
            elif isinstance(value, Prefilled):
                value = replace(value, model=f"demo {EVIL}", text=EVIL)
            elif isinstance(value, Step):
                value = replace(value, text=EVIL)
            yield value


def test_nothing_of_a_model_or_its_answer_is_obeyed_by_a_terminal(
    written: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "InProcess", Hostile)
    for more in ((), ("--verbose",), ("--json",)):
        said = written("generate", "--prompt", "x", *more)
        assert obeyed(said) == set() and ("from \ufffd" in said or "--json" in more)


def test_an_answer_in_a_pipe_is_exact_and_all_else_is_clean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "InProcess", Hostile)
    assert main(["generate", "--prompt", "x", "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{EVIL * 3}\n"
    assert obeyed(err) == set() and "note \ufffd" in err
    assert main(["generate", "--prompt", "x", "--json"]) == 0
    out = capsys.readouterr().out
    assert obeyed(out) == set() and json.loads(out.split("\n")[1])["text"] == EVIL


def test_what_inspect_says_of_a_folder_is_not_obeyed_in_a_pipe_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes through `less` or `head` to the terminal."""
    folder = tmp_path / "model\x1b[2J\u202e"
    folder.mkdir()
    config = {"model_type": EVIL, "architectures": [EVIL], "medusa_num_heads": EVIL}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for more in ((), ("--json",)):
        assert main(["inspect", str(folder), "--offline", *more]) == 4
        out, err = capsys.readouterr()
        assert obeyed(out + err) == set() and "\ufffd" in err


def test_an_error_and_its_usage_line_are_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["inspect", f"/nowhere/{EVIL[1:]}"], [f"--{EVIL}"], ["generate", "--tree", EVIL]):
        assert main(argv) != 0
        out, err = capsys.readouterr()
        assert obeyed(out + err) == set()


def test_a_warning_of_a_package_is_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """As transformers writes values of a config.json, in this process and in the worker's."""
    assert main(["--version"]) == 0
    warning = logging.makeLogRecord({"msg": f"unknown key {EVIL}"})
    logging.StreamHandler().handle(warning)
    print(EVIL)
    sys.stdout.writelines([EVIL])
    said = capsys.readouterr()
    assert obeyed(said.out + said.err) == set() and "unknown key \ufffd" in said.err


def test_the_model_s_process_prints_nothing_that_a_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printing(*_: object) -> None:
        print(EVIL, file=sys.stderr)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "serve_requests", printing)
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # put back after the test
    runner.serve(Pipe()[0])
    assert obeyed(capsys.readouterr().err) == set()


def test_a_note_of_several_lines_cannot_pass_for_ours(capsys: pytest.CaptureFixture[str]) -> None:
    note("from a file\nmedusa-chat: a forged line")
    assert capsys.readouterr().err.count("\n") == 1
