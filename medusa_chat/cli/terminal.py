"""The terminal: the text of answers on stdout; progress, notes and figures on stderr."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TextIO

from medusa_chat.clean_stream import clean, exact
from medusa_chat.decoding.events import Event, Finished, Prefilled, Reading, Told
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.hub import DownloadEvent
from medusa_chat.messages import LoadPhase, ModelInfo
from medusa_chat.paths import can_write
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import Runner
from medusa_chat.runtime.traces import to_json
from medusa_chat.units import transfer

LINE_SECONDS = 10.0  # between progress lines that go to a file
DIM, BRIGHT = "\033[2m", "\033[22m"


# ---- notes and progress ----


def note(message: str) -> None:
    """Print one line to stderr."""
    print(f"medusa-chat: {_one_line(message)}", file=sys.stderr, flush=True)


def progress(message: str) -> None:
    """Print one line to stderr if it is a terminal: scripts' logs do not get it."""
    if sys.stderr.isatty():
        note(message)


def _one_line(text: str) -> str:
    """Join lines: text from a file must not be able to forge a line of ours."""
    return text.replace("\n", " ")


def _erase_line() -> str:
    """Return to the start of the line and erase it; with spaces on Windows, where some consoles
    ignore escape codes."""
    if sys.platform == "win32":
        return f"\r{' ' * (shutil.get_terminal_size().columns - 1)}\r"
    return "\r\x1b[K"


class ProgressLine:
    """Progress on stderr: in a terminal one line that is redrawn and finally erased; in a file one
    line every LINE_SECONDS, since minutes of silence look like a hang."""

    def __init__(self) -> None:
        self._is_open = False
        self._printed_at = time.monotonic()
        self._note = ""

    def show(self, text: str) -> None:
        """Redraw the line, in a terminal only."""
        if sys.stderr.isatty():
            self._is_open = True
            width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be erased
            line = clean(_one_line(text))[:width]
            print(f"{_erase_line()}{line}", end="", file=exact(sys.stderr), flush=True)

    def tell(self, text: str) -> None:
        """Like `show`; in a file a new line every LINE_SECONDS."""
        self.show(text)
        if not self._is_open and time.monotonic() - self._printed_at > LINE_SECONDS:
            self._printed_at = time.monotonic()
            note(text)

    def show_bytes(self, phase: LoadPhase) -> None:
        """Bytes, speed and time left."""
        self.tell("  ".join([f"{phase.name}ing", *transfer(phase.done, phase.total, phase.rate)]))

    def note_once(self, text: str) -> None:
        """Print a permanent line, unless it is empty or the same as the last one."""
        if text and text != self._note:
            self.clear()
            self._note = text
            note(text)

    def clear(self) -> None:
        """Erase the line."""
        if self._is_open:
            self._is_open = False
            print(_erase_line(), end="", file=exact(sys.stderr), flush=True)


def show_load(phases: Iterable[LoadPhase], verbose: bool = False) -> ModelInfo | None:
    """Run a load to its end and show its phases -> the model, if the last phase has one. verbose:
    keep every phase and the model's notes on the screen."""
    line, model = ProgressLine(), None
    try:
        for phase in phases:
            model = phase.model
            line.note_once(phase.note)
            if phase.name == "download":
                line.show_bytes(phase)
            elif not verbose:
                line.show(f"loading: {phase.name}")
            elif phase.model is None:
                line.clear()
                note(f"loading: {phase.name}")
            else:
                for sentence in phase.model.notes:
                    note(sentence)
    finally:
        line.clear()
    return model


def show_download(events: Iterable[DownloadEvent]) -> Iterator[DownloadEvent]:
    """Show the events of a download, and yield them."""
    line = ProgressLine()
    for event in events:
        line.note_once(event.note)
        line.tell(download_line(event))
        yield event
    if sys.stderr.isatty():
        print(file=sys.stderr)


def download_line(event: DownloadEvent) -> str:
    """Bytes, speed, time left and file, on one line."""
    parts = transfer(event.done, event.total, event.speed)
    if event.phase in ("check", "wait"):
        parts.append({"check": "checking existing files", "wait": "waiting"}[event.phase])
    return "  ".join([*parts, event.file])[:100]


def show_reading(events: Iterable[Told]) -> Iterator[Event]:
    """Show how much of the prompt has been read, and yield all other events."""
    line = ProgressLine()
    try:
        for event in events:
            if isinstance(event, Reading):
                line.tell(f"reading: {event.tokens:,} of {event.prompt_tokens:,} tokens")
                continue
            line.clear()
            yield event
    finally:
        line.clear()


# ---- answers ----


def answer(
    runner: Runner, asked: Reply, as_json: bool, trace: TextIO | None, verbose: bool = False
) -> tuple[Finished | None, bool]:
    """Print one answer as it is generated. Returns its last event, if there was one, and whether
    Ctrl-C stopped it (the trace is complete even then)."""
    last, view = None, AnswerView(verbose)
    with stopping(runner.stop) as is_stopped, closing(runner.run(asked)) as events:
        for event in show_reading(events):
            line = json_line(to_json(event)) if as_json or trace is not None else ""
            if trace is not None:
                with write_errors(Path(trace.name)):
                    print(line, file=trace, flush=True)
            if as_json:
                print(line, flush=True)
            else:
                view.show(event)
            if isinstance(event, Finished):
                last = event
                if event.reason == "error":
                    raise MedusaChatError(event.message or "decoding failed")
    return last, is_stopped()


class AnswerView:
    """An answer in the terminal: its text on stdout as it is generated; reasoning (dimmed), the
    settings (if verbose or not a terminal), notes and final figures on stderr."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._reasoning_shown = 0  # characters
        self._is_reasoning = False

    def show(self, event: Event) -> None:
        """Print what an event adds."""
        if isinstance(event, Prefilled):
            self._show_prefill(event)
        if isinstance(event, Finished):
            reasoning, text = event.reasoning[self._reasoning_shown :], event.tail + "\n"
        else:
            reasoning, text = event.reasoning, event.text
        self._show_reasoning(reasoning)
        if text and self._is_reasoning:
            self._is_reasoning = False
            print("\n", file=sys.stderr, flush=True)
        is_data = not sys.stdout.isatty()  # a file or another program gets the exact text
        print(text, end="", file=exact(sys.stdout) if is_data else sys.stdout, flush=True)
        if isinstance(event, Finished):
            print(figures(event), file=sys.stderr, flush=True)

    def _show_prefill(self, event: Prefilled) -> None:
        if self._verbose or not sys.stderr.isatty():
            print(settings_line(event), file=sys.stderr, flush=True)
        if event.left_out:
            note(f"the context is full: the {event.left_out} oldest messages were left out")
        for sentence in event.notes:
            note(sentence)

    def _show_reasoning(self, text: str) -> None:
        if text:
            self._reasoning_shown += len(text)
            self._is_reasoning = True
            text = f"{DIM}{clean(text)}{BRIGHT}" if sys.stderr.isatty() else clean(text)
            print(text, end="", file=exact(sys.stderr), flush=True)


def json_line(value: object, indent: int | None = None) -> str:
    """A value as JSON, on one line unless indented. Contains no control character, not even DEL,
    which JSON allows."""
    separators = (",", ":") if indent is None else None
    return json.dumps(value, indent=indent, separators=separators).replace("\x7f", "\\u007f")


def settings_line(event: Prefilled) -> str:
    """One line: which model answers, and how it drafts."""
    chosen = event.settings
    return (
        f"{event.model}, {event.precision}, {event.device}; drafter {chosen.get('drafter')}, "
        f"tree {chosen.get('tree')} ({chosen.get('nodes')} nodes), seed {chosen.get('seed')}"
    )


def figures(event: Finished) -> str:
    """One line: tokens, steps, speed, and why the answer ended."""
    stats = event.stats
    parts = [f"{stats.new_tokens} tokens", f"{stats.steps} steps"]
    if stats.acceleration_rate is not None:
        parts.append(f"{stats.acceleration_rate:.2f} tokens/step")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    reasons = {"length": "max-new-tokens reached", "context": "the context is full"}
    return ", ".join([*parts, f"ended by {reasons.get(event.reason, event.reason)}"])


@contextmanager
def stopping(on_stop: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Yields `is_stopped`, true after the first Ctrl-C, which also calls `on_stop`; the second
    Ctrl-C interrupts at once. Does nothing outside the main thread, which alone gets signals."""
    stopped = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        on_stop()

    if threading.current_thread() is not threading.main_thread():
        yield stopped.is_set
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)


# ---- output files ----


@contextmanager
def open_trace(file: Path | None) -> Iterator[TextIO | None]:
    """The trace file, opened before the model is loaded, with its old content; None for None."""
    if file is None:
        yield None
        return
    require_writable(file)
    with write_errors(file):
        trace = open(file, "a", encoding="utf-8", newline="\n")
    try:
        yield trace
    finally:
        with write_errors(file):
            trace.close()


def require_writable(file: Path, *inputs: Path | None) -> None:
    """Raises UsageError unless `file` can be written without overwriting one of the inputs."""
    if not file.parent.is_dir():
        raise UsageError(f"cannot write {file}: its folder does not exist")
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder")
    if not (os.access(file, os.W_OK) if file.exists() else can_write(file.parent)):
        raise UsageError(f"cannot write {file}: permission denied")
    if file.exists() and any(one and one.exists() and one.samefile(file) for one in inputs):
        raise UsageError(f"{file} is also the input: give another file for the output")


@contextmanager
def write_errors(file: Path) -> Iterator[None]:
    """Turn an OSError while `file` is written into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
