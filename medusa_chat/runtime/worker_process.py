"""Serving: the worker's process. Requests in over a pipe, events out, until the app is gone."""

import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from medusa_chat.decoding.events import Event, Step
from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import DeviceMemory, LoadPhase, ModelInfo, Peek
from medusa_chat.runtime.model_slot import ModelSlot
from medusa_chat.runtime.tuner import tuned, with_tree
from medusa_chat.runtime.worker import peek, reply

BREATH = 0.01  # seconds


def serve(pipe: Connection) -> None:
    """The worker process: requests in, ("event", value) or ("events", values) out, then
    ("end", None) or ("refused", error). A ("stop",) that arrives while one runs ends an answer
    or a load."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _import_ahead()
    from medusa_chat.decoding.backends import cpu_threads

    cpu_threads.leave_one()  # the page, and mostly its browser, run beside
    holder = ModelSlot()
    try:
        while True:
            name, *arguments = pipe.recv()
            if name == "stop":
                continue  # it came after its answer had ended
            try:
                if name == "reply":
                    _send(pipe, reply(holder.loaded, *arguments, should_stop=_stop_asked(pipe)))
                else:
                    for value in _found(holder, name, arguments, _stop_asked(pipe)):
                        pipe.send(("event", value))
                pipe.send(("end", None))
            except MedusaChatError as error:
                pipe.send(("refused", error))
            except (OSError, EOFError):
                raise
            except Exception as error:  # told to the session, which shows it; the worker lives on
                pipe.send(("refused", RuntimeError(f"{type(error).__name__}: {error}")))
    except (EOFError, OSError, KeyboardInterrupt):
        return  # the app is gone, and with it the reason to live


def _found(
    holder: ModelSlot, name: str, arguments: list[Any], should_stop: Callable[[], bool]
) -> Iterator[LoadPhase | ModelInfo | Peek | DeviceMemory]:
    """What a request other than for an answer brings."""
    if name == "load":
        yield from holder.load(*arguments, should_stop=should_stop)
    elif name == "tune":
        yield from tuned(holder.loaded, should_stop, *arguments)
    elif name == "use_tree":
        yield from with_tree(holder.loaded, *arguments)
    elif name == "peek":
        yield peek(holder.loaded, *arguments)
    else:
        assert name == "memory", name
        yield holder.room_on(*arguments)


def _send(pipe: Connection, events: Iterator[Event]) -> None:
    """Events as they come; of those that follow each other within BREATH, several at once: every
    message wakes the other process, and a small model makes a thousand steps a second."""
    held: list[Event] = []
    sent = 0.0
    try:
        for event in events:
            held.append(event)
            now = perf_counter()
            if now - sent >= BREATH or not isinstance(event, Step):
                pipe.send(("events", held))
                held, sent = [], now
    finally:
        if held:
            pipe.send(("events", held))


def _stop_asked(pipe: Connection) -> Callable[[], bool]:
    """Whether a stop has arrived since the answer or the load began."""

    def asked() -> bool:
        while pipe.poll():
            if pipe.recv() == ("stop",):
                return True
        return False

    return asked


def _import_ahead() -> None:
    """Import what every load needs before the first one is asked for."""
    import torch  # noqa: F401
    import transformers  # noqa: F401
