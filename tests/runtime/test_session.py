"""The queue, the traces, and a worker process that dies."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest
from support.checkpoints import write_checkpoint
from support.scripted import ScriptedRunner
from support.waiting import wait_for
from support.warm_workers import warm_workers  # noqa: F401

from medusa_chat.decoding.events import Finished, Prefilled, Reading
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import LoadStopped, ModelError, UsageError
from medusa_chat.messages import CountRequest, LoadPhase, LoadRequest, PeekRequest, Request
from medusa_chat.runtime import model_lifecycle
from medusa_chat.runtime.requests import MAX_GUESTS, Queue, Reply, Switch, Ticket
from medusa_chat.runtime.runner import InProcess, WorkerGone, WorkerProcess
from medusa_chat.runtime.session import Session

SETTINGS = GenerationSettings(max_new_tokens=12, seed=1)
LONG = GenerationSettings(max_new_tokens=200, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("session") / "model")


@contextmanager
def worker_process(folder):
    session = Session(WorkerProcess())
    session.submit(LoadRequest(str(folder), precision="fp32"))
    yield session
    session.close()


@pytest.fixture(scope="module")
def shared(folder):
    with worker_process(folder) as session:
        yield session


@pytest.fixture
def child(shared, monkeypatch):
    """A child that is ready, whatever the tests before did to it: they are no row of ends."""
    monkeypatch.setattr(model_lifecycle, "STABLE_SECONDS", 0)
    wait_for(lambda: is_ready(shared))
    return shared


@pytest.fixture
def new_child(folder):
    """A child that just starts."""
    with worker_process(folder) as session:
        yield session


def test_the_child_answers_like_this_process(child, folder):
    here = Session(InProcess())
    list(here.lifecycle.run(LoadRequest(str(folder), precision="fp32")))
    job = child.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240), child.state
    assert not job.error
    mine = [event for event in here.lifecycle.run(Reply("hello", SETTINGS))]
    assert job.trace[-1].token_ids == mine[-1].token_ids
    assert isinstance(job.trace[0], Prefilled) and isinstance(job.trace[-1], Finished)


def test_jobs_wait_in_order_and_can_be_stopped(child):
    jobs = [child.submit(Reply("hello", LONG)) for _ in range(3)]
    wait_for(lambda: jobs[0].trace)
    assert [child.position(job) for job in jobs] == [0, 1, 2]
    child.cancel(jobs[2])
    child.cancel(jobs[0])
    assert jobs[0].done.wait(240) and jobs[0].trace[-1].reason == "cancelled"
    assert jobs[1].done.wait(240) and jobs[1].trace[-1].reason == "length"
    assert jobs[2].done.wait(240) and jobs[2].trace[-1].reason == "cancelled"
    assert len(jobs[2].trace) == 1


def test_a_refused_answer_leaves_the_worker_ready(child):
    job = child.submit(Reply("x" * 5000, SETTINGS))
    assert job.done.wait(240) and "context holds" in job.error
    again = child.submit(Reply("hello", SETTINGS))
    assert again.done.wait(240) and not again.error


def test_a_killed_worker_is_restarted_and_waiting_jobs_still_run(child):
    first = child.submit(Reply("hello", LONG))
    second = child.submit(Reply("hello", SETTINGS))
    wait_for(lambda: first.trace)
    os.kill(child.runner.pid, signal.SIGKILL)
    assert first.done.wait(240) and "restarted" in first.error
    assert not isinstance(first.trace[-1], Finished), "it was to die in its answer"
    assert second.done.wait(240) and not second.error, second.error
    assert second.trace[-1].reason == "length"


def test_a_template_that_never_ends_is_refused_and_the_worker_lives(tmp_path):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    session = Session(InProcess())
    session.submit(LoadRequest(str(write_checkpoint(tmp_path / "model", 0, endless))))
    conversation = [{"role": "user", "content": "hello"}]
    job = session.submit(Reply(conversation, SETTINGS))
    assert job.done.wait(240) and "chat template" in job.error and "seconds" in job.error
    job = session.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and not job.error
    session.close()


def is_ready(session):
    return session.state.status == "ready"


def test_a_worker_killed_while_idle_is_noticed_and_replaced(child):
    wait_for(lambda: is_ready(child))
    pid = child.runner.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_ready(child))
    assert child.state.status == "loading" and "signal 9" in child.state.message
    wait_for(lambda: is_ready(child))
    assert child.runner.pid != pid
    job = child.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and not job.error


def test_a_worker_killed_while_loading_is_replaced_and_waiting_jobs_still_run(new_child):
    job, pid = new_child.submit(Reply("hello", SETTINGS)), new_child.runner.pid
    os.kill(pid, signal.SIGKILL)  # before its load or in it: only the latter is worth a word
    wait_for(lambda: new_child.runner.pid != pid, seconds=60)
    assert job.done.wait(240) and not job.error, job.error


class Dying:
    """A runner whose loads end the worker, until it is told to live."""

    on_gone = None

    def __init__(self):
        self.loads, self.lives = 0, False

    def run(self, request):
        if isinstance(request, Reply):
            yield from ScriptedRunner(delay=0, prefill=0, steps=2).run(request)
            return
        self.loads += 1
        yield LoadPhase("read")
        if not self.lives:
            raise WorkerGone("the model's process ended (signal 9)")
        yield LoadPhase("ready", ScriptedRunner().model)

    def gone(self):
        return None if self.lives else WorkerGone("the model's process ended (signal 9)")

    def stop(self): ...
    def close(self): ...


def test_a_worker_that_keeps_ending_is_not_restarted_for_ever():
    session = Session(Dying())
    session.submit(LoadRequest())
    wait_for(lambda: session.state.status == "failed")
    assert session.runner.loads == 3
    assert "signal 9" in session.state.message and "--max-context" in session.state.message
    job = session.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and "repeatedly" in job.error
    assert session.runner.loads == 4 and session.state.status == "failed"
    session.runner.lives = True
    job = session.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and not job.error
    session.runner.lives = False
    session.runner.on_gone()  # while idle: the row begins again
    wait_for(lambda: session.state.status == "failed")
    assert session.runner.loads == 7
    session.close()


def test_a_load_that_was_given_up_is_not_tried_again_once_another_was_asked_for():
    session = Session(Dying())
    session.submit(LoadRequest())
    wait_for(lambda: session.state.status == "failed")
    session.runner.lives = True
    session.submit(LoadRequest("/another"))
    wait_for(lambda: session.state.status == "ready")
    job = session.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and not job.error
    assert session.runner.loads == 4 and session.lifecycle.requested == LoadRequest("/another")
    session.close()


class Stopped(Dying):
    """Its loads wait for `may_load`; one that is asked to stop meanwhile is stopped."""

    def __init__(self):
        super().__init__()
        self.may_load, self.stopped = threading.Event(), threading.Event()

    def run(self, request):
        if isinstance(request, LoadRequest) and self.lives:
            self.loads += 1
            yield LoadPhase("read")
            wait_for(lambda: self.may_load.is_set() or self.stopped.is_set())
            if self.stopped.is_set():
                raise LoadStopped("loading demo was stopped: no model is loaded")
            yield LoadPhase("ready", ScriptedRunner().model)
            return
        yield from super().run(request)

    def stop(self):
        self.stopped.set()


def test_a_message_that_is_stopped_does_not_stop_the_load_it_waits_for():
    """The page of a worker that was killed four times ended without a model: a message tried the
    load again, nobody watched any more, and the load was stopped with the message, for ever."""
    session = Session(Stopped())
    session.submit(LoadRequest())
    wait_for(lambda: session.state.status == "failed")
    session.runner.lives = True
    job = session.submit(Reply("hello", SETTINGS))
    wait_for(lambda: session.state.status == "loading")
    session.cancel(job)
    assert job.done.wait(240) and job.trace[-1].reason == "cancelled"
    session.runner.may_load.set()
    wait_for(lambda: session.state.status != "loading")
    job = session.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and not job.error
    session.close()


def test_a_message_brings_back_a_model_that_was_there_however_it_went():
    session = Session(Stopped())
    session.runner.lives = True
    session.runner.may_load.set()
    session.submit(LoadRequest())
    wait_for(lambda: is_ready(session))
    session.runner.may_load.clear()
    again = session.submit(LoadRequest())
    wait_for(lambda: session.state.phase == "read")
    session.cancel(again)
    wait_for(lambda: session.state.status == "empty")
    session.runner.stopped.clear()
    session.runner.may_load.set()
    job = session.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and not job.error and is_ready(session)
    session.close()


def test_what_failed_or_was_stopped_is_loaded_again_when_the_user_says_so():
    session = Session(Refusing())
    session.load_again()  # the demo, where nothing was asked for before
    wait_for(lambda: session.state.phase == "read")
    session.load_again()  # it is on its way
    session.runner.may_load.set()
    wait_for(lambda: is_ready(session))
    session.load_again()  # it is there
    assert session.runner.loads == [LoadRequest()]
    session.submit(LoadRequest("/broken"))
    wait_for(lambda: session.state.message == "the heads are broken")
    session.close()

    session = Session(Refusing())
    session.submit(LoadRequest("/broken"))
    wait_for(lambda: session.state.status == "failed")
    job = session.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and job.error == "the heads are broken"
    session.load_again()
    wait_for(lambda: len(session.runner.loads) == 2 and session.state.status == "failed")
    session.close()


def test_a_worker_that_ignores_stop_is_ended_and_started_again(child, monkeypatch):
    monkeypatch.setattr("medusa_chat.runtime.runner.PATIENCE", {"answer": 0.2})
    job = child.submit(Reply("hello", LONG))
    wait_for(lambda: job.trace)
    pid = child.runner.pid
    os.kill(pid, signal.SIGSTOP)  # it heeds nothing any more
    child.cancel(job)
    assert job.done.wait(240) and "did not stop" in job.error
    wait_for(lambda: is_ready(child))
    assert child.runner.pid != pid
    job = child.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and not job.error


class Refusing(ScriptedRunner):
    """Refuses to load "/broken"; other loads wait for `may_load`. stops: how often it was asked."""

    def __init__(self):
        super().__init__()
        self.may_load, self.stops = threading.Event(), 0
        self.loads = []

    def load(self, request):
        self.loads.append(request)
        yield LoadPhase("read")
        if request.checkpoint == "/broken":
            raise ModelError("the heads are broken")
        assert self.may_load.wait(240)
        yield LoadPhase("ready", self.model)

    def stop(self):
        self.stops += 1


def test_cancelling_a_switch_that_failed_lets_the_model_before_it_come_back():
    session = Session(Refusing())
    session.runner.may_load.set()
    session.submit(LoadRequest())
    wait_for(lambda: is_ready(session))
    session.runner.may_load.clear()
    switch = session.submit(Switch(LoadRequest("/broken")))
    assert switch.done.wait(240) and switch.error == "the heads are broken"
    session.cancel(switch)
    assert session.runner.stops == 0
    session.runner.may_load.set()
    wait_for(lambda: is_ready(session))
    session.close()


def test_a_request_that_waits_ends_at_once_when_it_is_cancelled():
    session = Session(ScriptedRunner(delay=0, prefill=0, hold_at=1))
    list(session.lifecycle.run(LoadRequest()))
    job = session.submit(Reply("hello", SETTINGS))
    wait_for(lambda: job.trace)
    requests = [PeekRequest((1,)), LoadRequest("/another")]
    tickets = [session.submit(request) for request in requests]
    assert [session.position(ticket) for ticket in tickets] == [1, 1]
    for ticket in tickets:
        session.cancel(ticket)
        assert ticket.done.is_set() and not ticket.trace and session.position(ticket) == 0
    session.cancel(job)
    assert job.done.wait(240) and job.trace[-1].reason == "cancelled"
    assert is_ready(session) and not session.runner.peeks
    session.close()


def test_the_owner_comes_before_guests_who_have_one_request_each():
    """A guest with 40 tabs put the owner behind 19 answers."""
    queue, reply = Queue(), Reply("hello", SETTINGS)

    def put(guest: str = "") -> Ticket:
        queue.put(ticket := Ticket(reply, guest))
        return ticket

    first, second = put("guest 0"), put("guest 1")
    owners, again, load = put(), put(), Ticket(LoadRequest())
    queue.put(load, is_next=True)
    for ticket in (load, owners, again, first):
        assert queue.next_ticket() is ticket
    for guest in ("guest 0", "guest 1"):  # one that runs, one that waits
        with pytest.raises(UsageError, match="your earlier answer"):
            put(guest)
    assert queue.position(second) == 1
    first.end()
    assert queue.position(second) == 0  # though the first was not released yet
    put("guest 0")
    for number in range(2, MAX_GUESTS):
        put(f"guest {number}")
    with pytest.raises(UsageError, match="try again in a moment"):
        put("one more")
    put()
    assert queue.next_ticket().guest == "" and queue.next_ticket() is second


def test_what_guests_count_and_look_up_comes_after_the_owner_and_refuses_no_answer():
    queue, count = Queue(), CountRequest(({"role": "user", "content": "hello"},))

    def put(request: Request, guest: str = "") -> Ticket:
        queue.put(ticket := Ticket(request, guest))
        return ticket

    theirs = [put(count, "guest 0"), put(PeekRequest((1,)), "guest 0")]
    answer = put(Reply("hello", SETTINGS), "guest 0")  # beside the quick ones, and while one runs
    owner = [put(count), put(Reply("hello", SETTINGS))]
    assert [queue.next_ticket() for _ in range(3)] == [*owner, theirs[0]]
    put(Reply("hello", SETTINGS), "guest 1")
    with pytest.raises(UsageError, match="your earlier answer"):
        put(Reply("hello", SETTINGS), "guest 0")
    assert [queue.next_ticket() for _ in range(2)] == [theirs[1], answer]
    for number in range(MAX_GUESTS):
        put(count, f"guest {number}")
    with pytest.raises(UsageError, match="try again in a moment"):
        put(count, "guest 99")
    put(Reply("hello", SETTINGS), "guest 2")


def test_a_look_that_takes_long_is_taken_up_again_instead_of_stopped(monkeypatch):
    """A stop would end the process of a model that is in one long call."""
    runner, may_end = ScriptedRunner(delay=0, prefill=0), threading.Event()
    session, peek, stops = Session(runner), runner.peek, []
    monkeypatch.setattr(runner, "peek", lambda request: may_end.wait(60) and peek(request))
    monkeypatch.setattr(runner, "stop", lambda: stops.append(True))
    list(session.lifecycle.run(LoadRequest()))
    first = session.take_up(PeekRequest((1,)))
    wait_for(lambda: first.state == "running")
    session.leave(first)
    other = session.take_up(PeekRequest((2,)))
    assert session.take_up(PeekRequest((1,))) is first and other is not first
    session.leave(other)
    assert other.done.is_set() and not stops
    may_end.set()
    assert first.done.wait(60) and first.result is not None and not first.is_cancelled
    assert session.take_up(PeekRequest((1,))) is not first
    session.close()


def test_a_failed_load_says_why_and_refuses_jobs():
    session = Session(InProcess())
    session.submit(LoadRequest("/no/such/folder"))
    job = session.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240) and "there is no folder" in job.error
    assert session.state.status == "failed" and "there is no folder" in session.state.message
    session.close()


def test_closing_a_childs_reply_leaves_nothing_for_the_next(child):
    job = child.submit(Reply("hello", SETTINGS))
    assert job.done.wait(240)
    events = child.lifecycle.run(Reply("hello", LONG))
    next(events), next(events)
    events.close()
    again = list(child.lifecycle.run(Reply("hello", SETTINGS)))
    assert isinstance(again[0], Prefilled)
    assert again[-1].token_ids == job.trace[-1].token_ids


def test_closing_ends_the_jobs_that_wait(new_child):
    jobs = [new_child.submit(Reply("hello", LONG)) for _ in range(3)]
    new_child.close()
    assert all(job.done.wait(240) for job in jobs[1:])
    assert "closed" in jobs[2].error


def test_closing_a_reply_cancels_and_the_model_stays_usable(folder):
    session = Session(InProcess())
    with pytest.raises(ModelError, match="no model is loaded"):
        list(session.lifecycle.run(Reply("hello", SETTINGS)))
    list(session.lifecycle.run(LoadRequest(str(folder))))
    whole = list(session.lifecycle.run(Reply("hello", SETTINGS)))[-1].token_ids
    events = session.lifecycle.run(Reply("hello", SETTINGS))
    next(events)
    events.close()
    assert list(session.lifecycle.run(Reply("hello", SETTINGS)))[-1].token_ids == whole


def test_a_stop_while_a_long_prompt_is_read_ends_there_and_keeps_what_was_read(folder):
    session = Session(InProcess())
    list(session.lifecycle.run(LoadRequest(str(folder))))
    whole = list(session.lifecycle.run(Reply("hello " * 20, SETTINGS)))
    engine = session.runner.worker.require().engine
    engine.forget()
    engine.backbone.chunk = 16
    seen = []
    for event in session.lifecycle.run(Reply("hello " * 20, SETTINGS)):
        seen.append(event)
        session.runner.stop()
    assert [type(event) for event in seen] == [Reading, Finished]
    assert seen[-1].reason == "cancelled" and seen[-1].token_ids == () and seen[0].tokens == 16
    again = list(session.lifecycle.run(Reply("hello " * 20, SETTINGS)))
    reading = [event.tokens for event in again if isinstance(event, Reading)]
    first = again[len(reading)]
    assert reading == list(range(32, whole[0].prompt_tokens, 16)) and len(reading) > 2
    assert first.reused_tokens == 16 and again[-1].token_ids == whole[-1].token_ids


def test_the_reading_of_a_prompt_has_a_patience_of_its_own(child, monkeypatch):
    """A part of a prompt takes a large model on a CPU longer than any step."""
    patience = {"prompt": 0.2, "answer": 240}
    monkeypatch.setattr("medusa_chat.runtime.runner.PATIENCE", patience)
    pid = child.runner.pid
    os.kill(pid, signal.SIGSTOP)
    job = child.submit(Reply("hello", LONG))
    wait_for(lambda: child.runner._running is not None)
    child.cancel(job)
    assert job.done.wait(120) and "did not stop" in job.error
    wait_for(lambda: is_ready(child))
    assert child.runner.pid != pid


def test_stop_from_outside_ends_the_answer_at_a_step(folder):
    session = Session(InProcess())
    list(session.lifecycle.run(LoadRequest(str(folder))))
    seen = []
    for event in session.lifecycle.run(Reply("hello", LONG)):
        seen.append(event)
        if len(seen) == 3:
            session.runner.stop()
    assert seen[-1].reason == "cancelled" and len(seen) == 4
    assert "".join(e.text for e in seen[:-1]) + seen[-1].tail == seen[-1].text
