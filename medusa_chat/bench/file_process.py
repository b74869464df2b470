"""FileProcess: a GGUF file loaded and asked in a process of its own, as `generate` does it."""

import multiprocessing
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import time
from typing import Any

from medusa_chat.bench.answers import Question, Run, page_run, question_of
from medusa_chat.bench.context import BenchContext, read_model
from medusa_chat.checkpoints.devices import most_threads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError, ModelError
from medusa_chat.messages import LoadRequest

FIRST = "What is the capital of Spain?"
DEFAULT = GenerationSettings(seed=0)


class FileProcess:
    """The process of one file, for the time of a `with`. device: where the model is. kind: what
    its weights are multiplied as, and by what. first_answer: seconds from the start of the process
    to the first token of an answer. Raises what the load refuses, and ModelError where the process
    ends early. With one thread the seconds of an answer are those of the processor."""

    def __init__(self, request: LoadRequest, tokens: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, child = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(request, tokens, time(), child))
        self._process.daemon = True
        self._process.start()
        child.close()
        self.device, self.kind, self.first_answer = "", "", 0.0

    def __enter__(self) -> "FileProcess":
        self.device, self.kind, self.first_answer = self._received()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()

    def plain(self, tokens: int) -> Run:
        """So many steps of plain decoding behind a prompt of one token, whatever they say."""
        return self._asked("plain", tokens)

    def answer(self, text: str, drafter: str) -> Run:
        """The answer to a user's message, at temperature 0."""
        return self._asked("answer", text, drafter)

    def peak(self) -> int:
        """The most bytes of main memory that the process has held; 0 where unknown."""
        return peak_of(self._process.pid or 0)

    def _asked(self, *wish: Any) -> Run:
        self._pipe.send(wish)
        found: Run = self._received()
        return found

    def _received(self) -> Any:
        try:
            found = self._pipe.recv()
        except EOFError:
            raise ModelError("the process that held the model ended early") from None
        if isinstance(found, Exception):
            raise found
        return found


def peak_of(process: int) -> int:
    """The most bytes of main memory that a process has held; 0 where Linux does not tell."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return 0


def _serve(request: LoadRequest, tokens: int, started: float, pipe: Connection) -> None:
    """In the child: load, answer once, then carry out wishes until there is None."""
    with closing(pipe), suppress(EOFError, BrokenPipeError):
        try:
            loaded = read_model(request, lambda message: None)
            context = BenchContext(request, loaded, "auto", 1, tokens, lambda message: None)
            page_run(replace(context, max_new_tokens=1), question_of(context, FIRST), DEFAULT)
            pipe.send((loaded.info.device, _kind(context), time() - started))
            while wish := pipe.recv():
                name, *values = wish
                found = {"plain": _plain, "answer": _answer}[name](context, *values)
                alone = most_threads() == 1 and found.busy
                pipe.send(replace(found, seconds=found.busy) if alone else found)
        except MedusaChatError as error:
            pipe.send(error)


def _kind(context: BenchContext) -> str:
    info = context.loaded.info
    return f"{info.precision}, steps by {context.loaded.engine.backend.name}"


def _plain(context: BenchContext, tokens: int) -> Run:
    engine, end = context.loaded.engine, context.loaded.engine.eos
    asked = GenerationSettings(drafter="none", seed=0)
    engine.eos = frozenset()
    try:
        question = Question(question_of(context, FIRST).ids[:1], "")
        return page_run(replace(context, max_new_tokens=tokens + 1), question, asked)
    finally:
        engine.eos = end


def _answer(context: BenchContext, text: str, drafter: str) -> Run:
    """Raises ContextError without space for an answer."""
    settings = GenerationSettings(drafter=drafter, seed=0)
    return page_run(context, question_of(context, text), settings)
