"""The worker's loop: what becomes of errors, the device's own among them."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.waiting import wait_for

from medusa_chat import runtime
from medusa_chat.checkpoints import devices, packing
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime import worker
from medusa_chat.runtime.requests import End, Reply
from medusa_chat.runtime.runner import WORKER, WorkerGone, WorkerProcess, preparing, serve

HELLO = Reply("hello", GenerationSettings())


class Failing:
    """A worker that fails as it is told."""

    error: Exception

    def __init__(self, packing: Any = None) -> None: ...

    def handle(self, request: Any, should_stop: Any) -> Iterator[Any]:
        raise self.error
        yield


@pytest.fixture
def loop(monkeypatch):
    """Our end of the pipe to a loop that runs here in a thread, and the thread."""
    monkeypatch.setattr(worker, "Worker", Failing)
    monkeypatch.setattr(devices, "leave_one_core", lambda: None)
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs,), daemon=True)
    thread.start()
    yield ours, thread
    ours.close()
    thread.join(60)
    assert not thread.is_alive()


def answer(pipe) -> End:
    pipe.send(HELLO)
    assert pipe.poll(60), "no answer"
    return pipe.recv()


def lost():
    raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore")


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access\nmore"),
        RuntimeError("Triton Error [CUDA]: (an illegal memory access)"),
    ],
)
def test_a_device_error_is_told_and_ends_the_worker(monkeypatch, loop, error):
    """The worker reported it and lived on with a dead CUDA context: every later load failed."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    Failing.error = error
    pipe, thread = loop
    end = answer(pipe)
    assert isinstance(end.error, ModelError) and "illegal memory access)" in str(end.error)
    thread.join(60)
    assert not thread.is_alive(), "the process would live on with a dead device"


def test_a_lost_device_is_a_lost_worker_to_the_session():
    """So it is started again as after any other crash, in an answer and in a load alike."""
    ours, theirs = Pipe()
    ended, writer = os.pipe()
    os.close(writer)  # what waits for the process sees its end
    parent = object.__new__(WorkerProcess)
    parent._sending, parent._pipe = threading.Lock(), ours
    parent._process = SimpleNamespace(sentinel=ended)
    theirs.send(End(ModelError("the GPU reported an error (x)"), is_last=True))
    with pytest.raises(WorkerGone, match="the GPU reported an error"):
        list(parent._exchange(HELLO))
    os.close(ended)


OWNER = """
import time
from medusa_chat.runtime.runner import WorkerProcess
if __name__ == "__main__":
    print(WorkerProcess().pid, flush=True)
    time.sleep(600)
"""


def test_no_worker_outlives_an_app_that_was_killed(tmp_path):
    """It would have noticed at its next word to the app: never, in a call that does not end."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    worker = psutil.Process(pid)
    wait_for(lambda: has_torch(worker))
    os.kill(pid, signal.SIGSTOP)  # it does nothing any more by itself
    owner.kill()
    owner.communicate()
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 60)


def has_torch(process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


@pytest.mark.parametrize(
    "error", [ModelError("no such model"), ValueError("a bug"), torch.OutOfMemoryError("full")]
)
def test_the_worker_outlives_any_other_error(loop, error):
    Failing.error = error
    pipe, thread = loop
    for _ in range(2):
        assert str(error) in str(answer(pipe).error)
    assert thread.is_alive()


def test_the_first_load_is_packed_while_the_packages_are_imported(monkeypatch):
    begun, request = [], LoadRequest("no-such-file.gguf")
    monkeypatch.setattr(
        packing, "begun", lambda asked: begun.append((asked, WORKER in sys.modules))
    )
    monkeypatch.setattr(devices, "leave_one_core", lambda: None)
    monkeypatch.setattr(runtime, "worker", worker)  # imported again below, and then as before
    monkeypatch.delitem(sys.modules, WORKER)
    ours, theirs = Pipe()
    ours.send(request)
    ours.close()
    serve(theirs)
    assert begun == [(request, False)]


def test_garbage_is_collected_again_once_the_packages_are_imported(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with preparing():
        assert gc.isenabled(), "they were imported before"
    monkeypatch.delitem(sys.modules, WORKER)
    with pytest.raises(ImportError), preparing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and frozen == []
    with preparing():
        assert not gc.isenabled()
    assert gc.isenabled() and frozen == [True]
