"""The terminal: what a command prints and writes while a model loads and answers.

Answers go to stdout, everything else to stderr.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TextIO

from medusa_chat.clean_stream import clean, exact
from medusa_chat.cli.progress_line import ProgressLine, note, with_progress
from medusa_chat.decoding.events import Event, Finished, Prefilled
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.messages import LoadPhase
from medusa_chat.paths import can_write
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import Runner
from medusa_chat.runtime.traces import to_json

DIM, BRIGHT = "\033[2m", "\033[22m"


def show_load(phases: Iterable[LoadPhase], verbose: bool = False) -> None:
    """Go through the phases. In a terminal one line says how far they are and goes when they are
    done; verbose: every phase and the model's notes stay there instead."""
    line = ProgressLine()
    try:
        for phase in phases:
            if phase.name in ("download", "convert"):
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


def answer(
    runner: Runner, asked: Reply, as_json: bool, trace: TextIO | None, verbose: bool = False
) -> tuple[Finished | None, bool]:
    """Print one answer as it comes. (Its end, None where there was none; whether Ctrl-C stopped
    it, which it does in order: the trace is whole.)"""
    last, shown = None, Shown(verbose)
    with (
        stopping(runner.stop) as is_stopped,
        closing(runner.run(asked)) as events,
    ):
        for event in with_progress(events):
            line = json_line(to_json(event)) if as_json or trace is not None else ""
            if trace is not None:
                with refusing(Path(trace.name)):
                    print(line, file=trace, flush=True)
            if as_json:
                print(line, flush=True)
            else:
                shown.show(event)
            if isinstance(event, Finished):
                last = event
                if event.reason == "error":
                    raise MedusaChatError(event.message or "decoding failed")
    return last, is_stopped()


class Shown:
    """An answer in the terminal: its text to stdout as it comes, all else to stderr. That is its
    reasoning, dimmed, the figures at the end, and before it what was chosen, in a terminal where it
    is verbose, and what of the conversation was not read as it is."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._thought = 0  # characters of reasoning
        self._is_thinking = False

    def show(self, event: Event) -> None:
        """Show what an event brings."""
        if isinstance(event, Prefilled):
            self._tell_prompt(event)
        is_last = isinstance(event, Finished)
        self._think(event.reasoning[self._thought :] if is_last else event.reasoning)
        text = event.tail + "\n" if is_last else event.text
        if text and self._is_thinking:
            self._is_thinking = False
            print("\n", file=sys.stderr, flush=True)
        is_data = not sys.stdout.isatty()  # for a file or another program, which want it as it is
        print(text, end="", file=exact(sys.stdout) if is_data else sys.stdout, flush=True)
        if isinstance(event, Finished):
            print(figures(event), file=sys.stderr, flush=True)

    def _tell_prompt(self, event: Prefilled) -> None:
        if self._verbose or not sys.stderr.isatty():
            print(choices(event), file=sys.stderr, flush=True)
        if event.left_out:
            note(f"the context is full: {event.left_out} of the oldest messages are left out")
        for sentence in event.notes:
            note(sentence)

    def _think(self, text: str) -> None:
        if text:
            self._thought, self._is_thinking = self._thought + len(text), True
            text = f"{DIM}{clean(text)}{BRIGHT}" if sys.stderr.isatty() else clean(text)
            print(text, end="", file=exact(sys.stderr), flush=True)


def json_line(value: object, indent: int | None = None) -> str:
    """A value as JSON in one line, or with an indent for people. No character in it is a control,
    not even DEL, which JSON lets stand."""
    separators = (",", ":") if indent is None else None
    return json.dumps(value, indent=indent, separators=separators).replace("\x7f", "\\u007f")


def choices(event: Prefilled) -> str:
    """One line: which model answers, and how it drafts."""
    chosen = event.settings
    return (
        f"{event.model}, {event.precision}, {event.device}; drafter {chosen.get('drafter')}, "
        f"tree {chosen.get('tree')} ({chosen.get('nodes')} nodes), seed {chosen.get('seed')}"
    )


def figures(event: Finished) -> str:
    """One line: how much, how fast, why it ended."""
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
    """Yields `is_stopped`, true after the first Ctrl-C, which also calls `on_stop`; a second
    Ctrl-C interrupts at once. Outside the main thread, where no signals arrive, it stays false.
    """
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


def progress(message: str) -> None:
    """One line on stderr where it is a terminal, so not in the logs of a script."""
    if sys.stderr.isatty():
        note(message)


@contextmanager
def opened(file: Path | None) -> Iterator[TextIO | None]:
    """The trace file, opened before the model is loaded; None without one. What was in it stays
    until the model is there."""
    if file is None:
        yield None
        return
    require_folder(file)
    with refusing(file):
        trace = open(file, "a", encoding="utf-8", newline="\n")
    try:
        yield trace
    finally:
        with refusing(file):
            trace.close()


def require_folder(file: Path, *read: Path | None) -> None:
    """Raises UsageError unless a file of this name can be written, and none of what is read would
    be lost by it."""
    if not file.parent.is_dir():
        raise UsageError(f"cannot write {file}: its folder does not exist")
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder")
    if not (os.access(file, os.W_OK) if file.exists() else can_write(file.parent)):
        raise UsageError(f"cannot write {file}: you may not write there")
    if file.exists() and any(one and one.exists() and one.samefile(file) for one in read):
        raise UsageError(f"{file} is what is read: give another file for what is written")


@contextmanager
def refusing(file: Path) -> Iterator[None]:
    """An OSError while `file` is written becomes a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
