"""The command line as a contract: names, exit codes, one line for each refusal."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from medusa_chat import __version__, paths
from medusa_chat.cli import chat, doctor, generate, training, ui
from medusa_chat.cli.generate import read_prompts
from medusa_chat.cli.main import WEAKENING_VARIABLES, main
from medusa_chat.cli.options import named
from medusa_chat.decoding.events import Event, Finished, Prefilled, Stats, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import (
    ContextError,
    DeviceError,
    MedusaChatError,
    ModelError,
    OutOfMemoryError,
    PortInUseError,
)
from medusa_chat.messages import LoadPhase, LoadRequest, ModelInfo, Prompt, Request
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import WorkerGone
from medusa_chat.runtime.session import NO_STATS
from medusa_chat.runtime.traces import from_json
from medusa_chat.training.recipe import TrainRequest, read_recipe

MODEL = ModelInfo("demo", "llama", "fp32", "cpu", 1, 3, 64, "sparse-8", 8, "", 1, ("note",))


class Scripted:
    """A runner that says "Once upon a time" a word a step, and remembers what it was asked."""

    def __init__(self) -> None:
        self.request: LoadRequest | None = None
        self.asked: list[tuple[Prompt, GenerationSettings]] = []
        self.refusal: Exception | None = None
        self.load_refusal: Exception | None = None
        self.refuse_at: int | None = None
        self.reason: Any = "eos"
        self.interrupt_at: int | None = None
        self.is_stopped = False
        self.is_closed = False

    def run(self, request: Request[Any]) -> Iterator[Any]:
        if isinstance(request, Reply):
            yield from self.reply(request.prompt, request.settings)
        else:
            assert isinstance(request, LoadRequest)
            self.request = request
            if self.load_refusal is not None:
                raise self.load_refusal
            yield LoadPhase("weights")
            yield LoadPhase("ready", MODEL)

    def reply(self, prompt: Prompt, settings: GenerationSettings) -> Iterator[Event]:
        self.asked.append((prompt, settings))
        if self.refusal is not None:
            raise self.refusal
        if len(self.asked) - 1 == self.refuse_at:
            raise ContextError("too long")
        chosen = settings.to_json()
        yield Prefilled("demo", "fp32", "cpu", chosen, (1, 2), 2, 0, (3,), "Once", 0.1)
        words = (" upon", " a", " time")
        for index, word in enumerate(words):
            if index == self.interrupt_at:
                signal.raise_signal(signal.SIGINT)
            if self.is_stopped:
                yield Finished("cancelled", (3,), "Once", "", NO_STATS)
                return
            yield Step(index, (4 + index,), word, 0.1, (0,))
        stats = Stats(4, 3, 1.0, 0.3, 0.1, 10.0)
        yield Finished(self.reason, (3, 4, 5, 6), "Once upon a time", "", stats, "it broke")

    def stop(self) -> None:
        self.is_stopped = True

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    monkeypatch.setattr(generate, "InProcess", lambda: scripted)
    monkeypatch.setattr(ui, "WorkerProcess", lambda: scripted)
    return scripted


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and the one line on stderr; nothing may be on stdout."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("medusa-chat: ") and err.count("\n") == 1, err
    return code, err


# Answers.


def test_answer_goes_to_stdout_and_figures_to_stderr(runner: Scripted, capsys: Any) -> None:
    assert main(["generate", "--prompt", "Tell me"]) == 0
    out, err = capsys.readouterr()
    assert out == "Once upon a time\n"
    assert "4 tokens, 3 steps, 1.00 tokens/step, 10.0 tokens/s, ended by eos" in err
    assert runner.asked[0][0] == [{"role": "user", "content": "Tell me"}]
    assert runner.is_closed


def test_raw_prompt_is_passed_as_it_is(runner: Scripted, capsys: Any) -> None:
    assert main(["generate", "--raw", "--prompt", " Once "]) == 0
    assert runner.asked[0][0] == " Once "


def test_each_raw_prompt_of_a_file_is_passed_as_it_is(
    runner: Scripted, capsys: Any, tmp_path: Path
) -> None:
    """Base models have no chat template, and a load is too dear for each of many prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": " Once "}\n{"prompt": "Two"}\n', "utf-8")
    assert main(["generate", "--raw", "--prompts", str(file)]) == 0
    assert [asked[0] for asked in runner.asked] == [" Once ", "Two"]
    capsys.readouterr()
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\n', "utf-8")
    code, line = refused(capsys, "generate", "--raw", "--prompts", str(file))
    assert code == 2 and '{"prompt": text}' in line


def test_json_is_one_event_a_line_and_the_trace_has_the_same(
    runner: Scripted, capsys: Any, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert main(["generate", "--prompt", "x", "--json", "--trace", str(trace)]) == 0
    out, _ = capsys.readouterr()
    assert trace.read_text("utf-8") == out
    events = [from_json(json.loads(line)) for line in out.splitlines()]
    assert [type(event) for event in events] == [Prefilled, Step, Step, Step, Finished]
    assert out.startswith('{"event":"prefilled",')


def test_every_option_reaches_the_request_and_the_settings(runner: Scripted, capsys: Any) -> None:
    options = (
        "--checkpoint c --backbone b --precision bf16 --device cuda:1 --max-context 64 --offline "
        "--drafter medusa --acceptance typical --temperature 0.5 --top-p 0.9 --top-k 7 "
        "--posterior-threshold 0.1 --posterior-alpha 0.2 --tree mc_sim_7b_63 --nodes 9 "
        "--min-p 0.05 --max-new-tokens 5 --seed 3 --stop A --stop B "
        "--repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -0.5"
    )
    assert main(["generate", "--prompt", "x", *options.split()]) == 0
    assert runner.request == LoadRequest(*("c", "b", "bf16", "cuda:1", 64, True, "mc_sim_7b_63", 9))
    expected = GenerationSettings(
        *("medusa", "typical", 0.5, 0.9, 7, 0.05, 1.1, 0.5, -0.5, 0.1, 0.2, "mc_sim_7b_63", 9, 5),
        *(3, ("A", "B")),
    )
    assert runner.asked[0][1] == expected
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_defaults_are_the_contract(runner: Scripted, capsys: Any) -> None:
    assert main(["generate", "--prompt", "x"]) == 0
    assert runner.request == LoadRequest(tree="auto")
    assert runner.asked[0][1] == GenerationSettings()


def test_prompts_of_a_file_are_answered_one_after_another(
    runner: Scripted, capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "b"}]
    file.write_text(f'{{"prompt": "a\\u2028"}}\n\n{json.dumps({"messages": chat})}\r\n', "utf-8")
    assert main(["generate", "--prompts", str(file)]) == 0
    assert capsys.readouterr().out == "Once upon a time\nOnce upon a time\n"
    assert [asked for asked, _ in runner.asked] == [
        [{"role": "user", "content": "a\u2028"}],
        chat,
    ]


def test_a_prompt_comes_from_the_standard_input(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    assert read_prompts(None, Path("-"), None, None) == ["from a pipe"]


def test_prompt_file_and_messages_file(runner: Scripted, capsys: Any, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "é"}]
    (tmp_path / "chat.json").write_text(json.dumps(chat), "utf-8")
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbf\xc3\xa9\r\n")
    assert main(["generate", "--messages", str(tmp_path / "chat.json")]) == 0
    assert main(["generate", "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    assert [asked[0]["content"] for asked, _ in runner.asked] == ["é", "é"]  # type: ignore[index]


def test_broken_characters_are_replaced_and_said(runner: Scripted, capsys: Any) -> None:
    assert main(["generate", "--prompt", "a\ud800\0b\udfff"]) == 0
    assert runner.asked[0][0] == [{"role": "user", "content": "a\ufffdb\ufffd"}]
    err = capsys.readouterr().err
    assert "2 broken characters" in err and "1 null bytes" in err


# Ends.


def test_interrupt_ends_the_answer_in_order(runner: Scripted, capsys: Any, tmp_path: Path) -> None:
    runner.interrupt_at = 1
    trace = tmp_path / "trace.jsonl"
    before = signal.getsignal(signal.SIGINT)
    assert main(["generate", "--prompt", "x", "--trace", str(trace)]) == 130
    assert json.loads(trace.read_text("utf-8").splitlines()[-1])["reason"] == "cancelled"
    assert signal.getsignal(signal.SIGINT) is before
    assert runner.is_closed


def test_error_while_decoding_is_one_line(runner: Scripted, capsys: Any) -> None:
    runner.reason = "error"
    assert main(["generate", "--prompt", "x", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "medusa-chat: it broke\n"
    assert json.loads(out.splitlines()[-1])["reason"] == "error"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MedusaChatError("x"), 1),
        (ContextError("x"), 2),
        (DeviceError("x"), 3),
        (ModelError("two\nlines"), 4),
        (OutOfMemoryError("x"), 5),
        (MemoryError(), 5),
        (PortInUseError("x"), 6),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(runner: Scripted, capsys: Any, error: Exception, code: int) -> None:
    runner.refusal = error
    assert main(["generate", "--prompt", "x"]) == code
    assert capsys.readouterr().err.count("\n") == (code != 130)


def test_our_own_bugs_keep_their_traceback(runner: Scripted) -> None:
    runner.refusal = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        main(["generate", "--prompt", "x"])


def test_a_refused_command_leaves_the_old_trace(
    runner: Scripted, capsys: Any, tmp_path: Path
) -> None:
    old = tmp_path / "old.jsonl"
    old.write_text("precious", "utf-8")
    runner.load_refusal = ModelError("not there")
    assert main(["generate", "--prompt", "x", "--trace", str(old)]) == 4
    assert old.read_text("utf-8") == "precious"
    runner.load_refusal = None
    assert main(["generate", "--prompt", "x", "--trace", str(old)]) == 0
    assert json.loads(old.read_text("utf-8").splitlines()[0])["event"] == "prefilled"


@pytest.mark.parametrize(
    "command", [["generate", "--trace"], ["bench", "--study", "drafters", "--output"]]
)
def test_what_is_read_is_not_written_over(
    runner: Scripted, capsys: Any, tmp_path: Path, command: list[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n', "utf-8")
    code, line = refused(capsys, *command, str(file), "--prompts", str(file))
    assert code == 2 and "is also the input" in line
    assert file.read_text("utf-8") == '{"prompt": "x"}\n'


def test_a_prompt_of_several_that_is_refused_is_named(
    runner: Scripted, capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', "utf-8")
    runner.refuse_at = 1
    assert main(["generate", "--prompts", str(file)]) == 2
    assert "prompt 2 of 2: too long" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it has no /dev/full")
def test_a_full_output_is_one_line_and_a_closed_one_no_fault(tmp_path: Path) -> None:
    command = f"{sys.executable} -m medusa_chat"
    for redirect, code, said in ((">/dev/full", 1, "cannot write the output"), (">&-", 0, "")):
        found = subprocess.run(
            f"{command} models list {redirect}", shell=True, capture_output=True, text=True
        )
        assert (found.returncode, found.stderr.count("\n")) == (code, 1 if said else 0), found
        assert said in found.stderr


class WithoutReader(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_WRONLY)


def test_a_closed_pipe_is_no_fault_as_windows_tells_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "stdout", WithoutReader())
    assert main(["--version"]) == 1


def test_off_a_console_windows_reads_and_writes_utf_8(monkeypatch: Any) -> None:
    text = "\u4f60\u597d \u2192 \U0001f600"
    given, out = io.BytesIO(text.encode()), io.BytesIO()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given, encoding="cp1252"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="cp1252"))
    read: list[str] = []
    monkeypatch.setattr(chat.Chat, "run", lambda _: print(text, end="") or read.append(input()))
    assert main(["chat"]) == 0
    assert read == [text] and out.getvalue().decode() == text


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--prompts", "nope"], "--prompts and --questions are for the studies"),
        (["--study", "exactness", "--prompts", "nope"], "there is no file nope"),
        (["--study", "peers", "--llama-bench", "nope"], "there is no program nope"),
        (["--study", "peers", "--file", "nope"], "there is no file nope"),
        (["--study", "peers"], "name each with --file FILE.gguf"),
        (["--study", "peers", "--study", "steps"], "run it alone"),
        (["--study", "steps", "--llama-bench", "sh"], "are for --study peers"),
        (["--study", "exactness", "--nodes", "4", "--nodes", "8"], "--nodes is repeatable for"),
        (["--study", "vllm", "--vllm-heads", "nope"], "there is no folder nope"),
        (["--study", "ladder"], "paper/run.py ladder"),
        (["--shape", "7b", "--checkpoint", "demo"], "random weights"),
    ],
)
def test_bench_refuses_what_is_missing_before_it_measures(
    capsys: Any, options: list[str], word: str
) -> None:
    code, line = refused(capsys, "bench", *options)
    assert code == 2 and word in line


def test_heads_that_ship_name_their_base_as_a_backbone() -> None:
    assert named("heads", "smollm2") == ("heads", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert named(None, "smollm2") == ("smollm2", None) == named("smollm2", None)


# Refusals, all before a model is loaded.


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "2.1"], "from 0 to 2"),
        (["--temperature", "-0.1"], "from 0 to 2"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-p", "inf"], "--top-p is inf"),
        (["--top-k", "-1"], "--top-k is -1"),
        (["--min-p", "1.1"], "--min-p is 1.1"),
        (["--posterior-threshold", "1.5"], "--posterior-threshold is 1.5"),
        (["--posterior-alpha", "1"], "below 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--max-new-tokens", "1.5"], "--max-new-tokens"),
        (["--nodes", "0"], "nodes is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", ""], "not empty"),
        (["--drafter", "oracle"], "medusa, dflash, eagle, hydra, mlp, draft, prompt-lookup, none"),
        (["--acceptance", "maybe"], "exact, typical, typical-sampled"),
        (["--tree", "oak"], "one of auto, chain-3"),
        (["--tree", ""], "tree is ''"),
        (["--tree", "chain-3", "--nodes", "9"], "chain-3 allows 1 to 4 nodes"),
        (["--precision", "int4"], "auto, fp32, bf16, fp16, int8, nf4"),
        (["--device", "tpu"], "auto, cpu, cuda, cuda:N or mps"),
        (["--max-context", "0"], "--max-context"),
        (["--raw", "--messages", "x"], "exactly one"),
        (["--unknown"], "--unknown"),
    ],
)
def test_options_out_of_range(runner: Scripted, capsys: Any, options: list[str], word: str) -> None:
    code, line = refused(capsys, "generate", "--prompt", "x", *options)
    assert code == 2
    assert word in line
    assert runner.request is None


@pytest.mark.parametrize("prompt", ["", " \n\t", "\0", "\u2003"])
def test_prompt_without_text(runner: Scripted, capsys: Any, prompt: str) -> None:
    assert main(["generate", "--prompt", prompt]) == 2
    assert "--prompt is empty" in capsys.readouterr().err
    assert runner.request is None


@pytest.mark.parametrize("options", [[], ["--prompt", "x", "--prompt-file", "y"]])
def test_exactly_one_source_of_the_prompt(
    runner: Scripted, capsys: Any, options: list[str]
) -> None:
    assert refused(capsys, "generate", *options)[0] == 2


@pytest.mark.parametrize(
    ("option", "content", "word"),
    [
        ("--prompt-file", b"\xff\xfe", "not UTF-8"),
        ("--prompt-file", b"x" * 10_000_001, "larger than 10 MB"),
        ("--prompt-file", b" \n", "is empty"),
        ("--messages", b"[", "not JSON"),
        ("--messages", b"[" * 100_000, "not JSON"),
        ("--messages", b"{}", "give a list"),
        ("--messages", b"[]", "give a list"),
        ("--messages", b"[3]", "message 1"),
        ("--messages", b'[{"role": "user"}]', "message 1"),
        ("--messages", b'[{"role": "user", "content": "x", "path": "/"}]', "message 1"),
        ("--messages", b'[{"role": "user", "content": {"path": "/"}}]', "content must be a string"),
        ("--messages", b'[{"role": "tool", "content": "x"}]', "role is 'tool'"),
        ("--messages", b'[{"role": ["user"], "content": "x"}]', "role is ['user']"),
        ("--messages", b'[{"role": "assistant", "content": "x"}]', "must have the role user"),
        ("--messages", b'[{"role": "user", "content": " "}]', "message 1 is empty"),
        ("--prompts", b"", "no prompts"),
        ("--prompts", b'{"prompt": "x"}\nnonsense', "line 2 is not JSON"),
        ("--prompts", b'{"prompt": 3}', "line 1"),
        ("--prompts", b'{"prompt": ""}', "line 1 is empty"),
        ("--prompts", b'{"prompt": "x", "messages": []}', "line 1"),
        ("--prompts", b'["x"]', "line 1"),
    ],
)
def test_files_that_hold_no_prompt(
    runner: Scripted, capsys: Any, tmp_path: Path, option: str, content: bytes, word: str
) -> None:
    file = tmp_path / "given"
    file.write_bytes(content)
    code, line = refused(capsys, "generate", option, str(file))
    assert code == 2
    assert word in line and "given" in line
    assert runner.request is None


@pytest.mark.parametrize("option", ["--prompt-file", "--messages", "--prompts"])
@pytest.mark.parametrize("name", ["absent", ".", "a\0b", "x" * 5000])
def test_files_that_cannot_be_read(
    runner: Scripted, capsys: Any, tmp_path: Path, option: str, name: str
) -> None:
    assert refused(capsys, "generate", option, str(tmp_path / name))[0] == 2


def test_raw_refuses_messages(runner: Scripted, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "x"}]')
    code, line = refused(capsys, "generate", "--raw", "--messages", str(tmp_path / "chat.json"))
    assert code == 2 and "--raw" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_trace_on_a_full_disk_is_refused_in_one_line(runner: Scripted, capsys: Any) -> None:
    code, line = refused(capsys, "generate", "--prompt", "x", "--trace", "/dev/full")
    assert code == 2 and "cannot write /dev/full: No space left" in line


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_a_terminal_that_is_closed_ends_a_command_in_order(monkeypatch: Any) -> None:
    """What it was writing is cleared away, as after Ctrl-C."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # whatever started the tests: nohup ignores a hangup
        monkeypatch.setattr(generate.Generate, "run", lambda self, n=number: signal.raise_signal(n))
        with pytest.raises(SystemExit) as end:
            main(["generate", "--prompt", "x"])
        assert end.value.code == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize("place", ["absent/trace.jsonl", "."])
def test_trace_that_cannot_be_written(
    runner: Scripted, capsys: Any, tmp_path: Path, place: str
) -> None:
    code, line = refused(capsys, "generate", "--prompt", "x", "--trace", str(tmp_path / place))
    assert code == 2 and "cannot write" in line
    assert runner.request is None


# The other commands.


def test_version_and_unknown_commands(capsys: Any) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"medusa-chat {__version__}\n"
    assert refused(capsys, "dance")[0] == 2


def test_weakening_variables_are_forgotten(
    runner: Scripted, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WEAKENING_VARIABLES:
        monkeypatch.setenv(name, "1")
    assert main(["generate", "--prompt", "x"]) == 0
    err = capsys.readouterr().err
    for name in WEAKENING_VARIABLES:
        assert name not in os.environ
        assert name in err


def page(monkeypatch: pytest.MonkeyPatch, code: int = 0) -> dict[str, Any]:
    """What the page is opened with."""
    opened: dict[str, Any] = {}

    def launch(session: Any, options: dict[str, Any]) -> int:
        opened.update(options, session=session)
        return code

    module = types.ModuleType("medusa_chat.ui.app")
    module.launch = launch  # type: ignore[attr-defined]
    module.PageOptions = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "medusa_chat.ui.app", module)
    return opened


@pytest.mark.parametrize("command", [[], ["ui"]])
def test_page_is_what_runs_without_a_command(
    runner: Scripted, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    opened = page(monkeypatch, code=130)
    options = ["--port", "8000", "--no-browser", "--auth", "me:a:b", "--checkpoint", "c"]
    assert main([*command, *options]) == 130
    assert opened["port"] == 8000
    assert opened["auth"] == ("me", "a:b")
    assert not opened["open_browser"] and not opened["share"]
    assert "mc_sim_7b_63" in opened["trees"]
    assert runner.is_closed


def test_ctrl_c_in_the_first_load_is_told_as_no_failure(
    runner: Scripted, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closed = threading.Event(), threading.Event()

    def run(self: Scripted, request: Request[Any]) -> Iterator[Any]:
        begun.set()
        closed.wait(20)
        raise WorkerGone("the model's process ended")
        yield

    def interrupt() -> None:
        begun.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(Scripted, "run", run)
    monkeypatch.setattr(Scripted, "close", lambda self: closed.set())
    monkeypatch.setattr(ui, "_page", interrupt)
    assert main(["ui"]) == 130
    for thread in threading.enumerate():
        if "(tell)" in thread.name:
            thread.join(20)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("auth", ["", "me", "me:", ":secret"])
def test_auth_needs_both_parts(
    runner: Scripted, capsys: Any, monkeypatch: pytest.MonkeyPatch, auth: str
) -> None:
    page(monkeypatch)
    code, line = refused(capsys, "ui", "--auth", auth)
    assert code == 2
    assert "USER:PASSWORD" in line


def test_doctor_says_what_is_here(capsys: Any) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sections"]["packages"]["torch"]
    assert report["sections"]["cpu"]["cores"] == os.cpu_count()
    assert report["sections"]["cpu"]["C compiler"]
    assert "--data-dir" in report["sections"]["folders"]["data"]
    assert main(["doctor"]) == 0
    assert "torch is built for" in capsys.readouterr().out


def test_doctor_reports_where_torch_cannot_be_imported(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an ImportError
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sections"]["packages"]["torch"]
    assert any(problem.startswith("torch is broken") for problem in report["problems"])


def test_doctor_fails_only_for_a_device_asked_for(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Report({"devices": {"cuda": []}}))
    assert main(["doctor"]) == 0
    assert main(["doctor", "--device", "cuda"]) == 3
    assert "no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Report({"devices": {"cuda": ["H200"]}}))
    assert main(["doctor", "--device", "cuda:0"]) == 0


@pytest.mark.parametrize("name", ["~nosuch/model", "~nosuch/model.gguf"])
def test_the_home_of_nobody_is_no_checkpoint(name: str, capsys: Any) -> None:
    code, line = refused(capsys, "generate", "--checkpoint", name, "--prompt", "x")
    assert code == 4 and "there is no f" in line


def test_half_a_safetensors_file_is_not_whole(tmp_path: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    file = tmp_path / "model.safetensors"
    save_file({"a": numpy.zeros(100, dtype="float32")}, file, metadata={"made": "here"})
    assert doctor.is_whole(file)
    whole = file.read_bytes()
    for size in (0, 4, 20, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert not doctor.is_whole(file)
    assert not doctor.is_whole(tmp_path / "absent.json")


def test_every_option_of_a_recipe_reaches_the_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[TrainRequest] = []
    monkeypatch.setattr(training, "run_training", lambda request, as_json: asked.append(request))
    changes = {
        **{"method": "medusa-2", "heads": 4, "head_layers": 2, "own_lm_head": True},
        **{"root": True},
        **{"distill": True, "self_talk": 2, "epochs": 3, "max_steps": 7},
        **{"batch_tokens": 99, "learning_rate": 0.5, "head_learning_rate_multiplier": 2.0},
        **{"lambda0": 0.3, "lambda0_schedule": "sine", "decay": 0.7, "warmup_steps": 5},
        **{"lora_rank": 6, "lora_alpha": 8, "lora_dropout": 0.5, "seed": 9},
    }
    assert list(changes) == [field.name for field in fields(training.RecipeOptions)]
    options: list[str] = []
    for name, value in changes.items():
        option = f"--{name.replace('_', '-')}"
        options += [option] if value is True else [option, str(value)]
    file = tmp_path / "data.txt"
    file.write_text("x")
    main(["train", "--data", str(file), "--output", str(tmp_path / "new"), *options])
    assert asked[0].recipe == read_recipe("default").changed(**changes)


def test_bench_prints_a_table_or_json_and_saves_it(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = {"machine": {}, "rows": []}
    module = types.ModuleType("medusa_chat.bench")
    module.run = lambda request, **options: result | {"options": options["rounds"]}  # type: ignore[attr-defined]
    module.run_shape = lambda shape, request, progress, **rest: {"shape": shape, **rest}  # type: ignore[attr-defined]
    module.table = lambda result: "a table"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "medusa_chat.bench", module)
    file = tmp_path / "speed.json"
    assert main(["bench", "--rounds", "2", "--output", str(file)]) == 0
    assert capsys.readouterr().out == "a table\n"
    assert json.loads(file.read_text("utf-8")) == result | {"options": 2}
    assert main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"] == 5
    assert main(["bench", "--shape", "7b", "--layers", "2", "--study", "steps", "--json"]) == 0
    shaped = json.loads(capsys.readouterr().out.replace("\n", ""))
    assert (shaped["shape"], shaped["layers"], shaped["studies"]) == ("7b", 2, ["steps"])
    assert refused(capsys, "bench", "--shape", "9b")[0] == 2
    assert refused(capsys, "bench", "--layers", "2")[0] == 2
    assert refused(capsys, "bench", "--tree", "oak")[0] == 2
    assert refused(capsys, "bench", "--output", str(tmp_path / "absent" / "x"))[0] == 2


# Files.


def test_data_dir_holds_everything(
    runner: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["generate", "--prompt", "x", "--data-dir", str(tmp_path / "mine")]) == 0
    folders = {paths.data_dir(), paths.state_dir(), paths.cache_dir()}
    assert len(folders) == 3
    assert all(folder.is_relative_to(tmp_path / "mine") for folder in folders)
    monkeypatch.delenv(paths.DATA_DIR_VARIABLE)
    assert not paths.data_dir().is_relative_to(tmp_path)


def test_text_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file.json"
    paths.write_text(file, "é\n")
    assert file.read_bytes() == "é\n".encode()
    with pytest.raises(UnicodeEncodeError):
        paths.write_text(file, "\ud800")
    assert file.read_text("utf-8") == "é\n"
    assert list(file.parent.iterdir()) == [file]
