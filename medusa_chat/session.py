"""Session: the one door of every front end to a model. One queue of jobs, append-only traces.

Behind it stands a runner (runners.py): the model in this process, or in a child process of its
own. This module never imports torch.
"""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from medusa_chat.decoding.events import Event, Finished, Stats
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import LoadStopped, MedusaChatError, ModelError
from medusa_chat.jobs import Job, Look, ModelState, Switch, Tune, Weigh
from medusa_chat.messages import (
    BEFORE_READING,
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    ModelInfo,
    Peek,
    PeekRequest,
    PersonalTree,
    Prompt,
)
from medusa_chat.runners import Runner, WorkerGone

MAX_DEATHS = 3  # of the worker in a row: then restarting is left to the user
STEADY_SECONDS = 60.0  # a worker that was ready for so long has broken the row
IDLE_SECONDS = 2.0  # without a job, before the model's steps are timed
REMEDY = (
    "Send a message to try again; if it ends again, choose a smaller model or --max-context, "
    "or close other programs."
)
FOR_WANT_OF_MEMORY = (
    "most likely for want of memory: choose int8 or nf4, a smaller context or a smaller model"
)
STOPPED = "stopped: the model that was there before is used"
NO_STATS = Stats(0, 0, None, 0.0, 0.0, None)


class Session:
    """One model and the jobs that want it, first come first served."""

    def __init__(self, runner: Runner, tunes: bool = False) -> None:
        """tunes: whether the model's steps are timed once after a load, when nobody asks."""
        self.runner = runner
        self._tunes, self._is_untuned, self._is_tuning = tunes, False, False
        self.state = ModelState()
        self.loaded: LoadRequest | None = None  # what the model that is there was asked by
        self.memory: DeviceMemory | None = None  # as it was when somebody asked last
        self._request: LoadRequest | None = None
        self.on_model: Callable[[ModelInfo], None] | None = None  # told of each one that is ready
        self._lost: LoadRequest | None = None  # a load that was given up
        self._deaths = 0  # of the worker in a row
        self._ready_at = 0.0
        self._is_suspect = False  # the worker may be gone: to be asked
        self._jobs: deque[Job | LoadRequest | Look | Switch | Tune | Weigh] = deque()
        self._running: Job | Switch | Tune | None = None
        self._held: tuple[LoadRequest, ModelInfo] | None = None  # the model that is there
        self._is_loading = False  # in the session's own thread
        self._is_load_stopped = False
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        runner.on_gone = self._suspect

    def load(self, request: LoadRequest) -> Iterator[LoadPhase]:
        """Load at once, in this thread; raises what the worker refuses."""
        self._request = request
        why = self.state.message if self.state.status == "loading" else ""
        self.state = ModelState("loading", "restart" if why else "start", why)
        try:
            for phase in self.runner.load(request):
                self._follow(request, phase, why)
                yield phase
                if self._is_load_stopped:
                    self.runner.stop()  # it was asked before the runner had begun
        except MedusaChatError as error:
            self._fall_back(error)
            raise

    def _follow(self, request: LoadRequest, phase: LoadPhase, why: str) -> None:
        if phase.model is not None:
            self._ready_at = time.monotonic()
            self._held = request, phase.model
            self.state = ModelState("ready", model=phase.model)
            self._is_untuned = self._tunes
            if self.on_model is not None:
                self.on_model(phase.model)
            return
        if phase.name not in BEFORE_READING:
            self._held = None
        sizes = (phase.done, phase.total, phase.rate)
        self.state = ModelState("loading", phase.name, why, None, *sizes)

    def _fall_back(self, error: MedusaChatError) -> None:
        """After a load that was refused or stopped: what was there before, if it still is."""
        if isinstance(error, WorkerGone) or getattr(error, "is_model_lost", False):
            self._held = None
        if self._held is not None:
            self._request, model = self._held
            self.state = ModelState("ready", message=str(error), model=model)
        elif isinstance(error, LoadStopped):
            self._request = None
            self.state = ModelState("empty", message=str(error))
        else:
            self.state = ModelState("failed", message=str(error))

    def reply(self, prompt: Prompt, settings: GenerationSettings) -> Iterator[Event]:
        """Answer at once, in this thread. Closing the iterator cancels."""
        return self.runner.reply(prompt, settings)

    def submit(self, prompt: Prompt, settings: GenerationSettings) -> Job:
        """Queue a job for the session's own thread and return it at once."""
        job = Job(prompt, settings)
        self._enqueue(job)
        return job

    @property
    def request(self) -> LoadRequest | None:
        """What was asked for last; None before anything was."""
        return self._request

    def submit_load(self, request: LoadRequest) -> None:
        """Queue a load for the session's own thread; `state` follows it."""
        with self._changed:
            self._request = self._request or request
            if self._running is None and not self._jobs:
                self.state = ModelState("loading", "start")
        self._enqueue(request)

    def stop_load(self) -> None:
        """End the load that runs, and those that wait; `state` says what is there then."""
        with self._changed:
            kept = [job for job in self._jobs if not isinstance(job, LoadRequest)]
            was_waiting = len(kept) < len(self._jobs)
            self._jobs = deque(kept)
            if self._is_loading:
                self._is_load_stopped = True
                self.runner.stop()
            elif was_waiting and self.state.status == "loading":
                self._fall_back(LoadStopped("loading was stopped before it began"))

    def submit_switch(self, request: LoadRequest) -> Switch:
        """Queue the change to another model behind what is asked already; returns at once."""
        switch = Switch(request)
        self._enqueue(switch)
        return switch

    def cancel(self, switch: Switch) -> None:
        """Give a switch up: at once while it waits, else within a second; the model before it is
        loaded again. What was ready already stays."""
        with self._changed:
            switch.is_cancelled = True
            if switch in self._jobs:
                self._jobs.remove(switch)
                switch.error = STOPPED
                switch.end()
            elif switch is self._running:
                self.runner.stop()

    def ask_memory(self) -> None:
        """Let `memory` be looked at again when the model is free; returns at once."""
        with self._changed:
            if any(isinstance(job, Weigh) for job in self._jobs):
                return
        self._enqueue(Weigh())

    def submit_tune(self) -> Tune:
        """Queue the timing of the steps, whether they were timed before or not."""
        tune = Tune(is_measuring=True)
        self._enqueue(tune)
        return tune

    def submit_tree(self, personal: PersonalTree | None) -> Tune:
        """Queue another tree behind `--tree auto`, None for the checkpoint's own again: answers
        that are asked for from now on follow it."""
        tune = Tune(is_measuring=False, tree=personal)
        self._enqueue(tune)
        return tune

    def position(self, job: Job | Switch | Tune) -> int:
        """How many jobs come before this one; 0 when it runs or has ended."""
        with self._changed:
            if job not in self._jobs:
                return 0
            before = itertools.takewhile(lambda other: other is not job, self._jobs)
            waiting = sum(not isinstance(other, Look | Weigh) for other in before)  # take no time
            return waiting + (self._running is not None)

    def submit_look(self, request: PeekRequest) -> Look:
        """Queue a look into the model behind what is asked already; returns at once."""
        look = Look(request)
        self._enqueue(look)
        return look

    def peek(self, request: PeekRequest, timeout: float | None = None) -> Peek:
        """The most probable tokens at one place; waits behind a running answer.

        Raises ModelError: why there is no answer, or none within `timeout` seconds.
        """
        look = self.submit_look(request)
        if not look.done.wait(timeout):
            look.is_cancelled = True
            raise ModelError("the model is busy: try again when the running answer has ended")
        if look.peek is None:
            raise ModelError(look.error)
        return look.peek

    def stop(self, job: Job) -> None:
        """End a job: at its next step when it runs, at once while it waits."""
        with self._changed:
            job.is_cancelled = True
            if job is self._running:
                self.runner.stop()
            elif job in self._jobs:
                self._jobs.remove(job)
                job.trace.append(Finished("cancelled", (), "", "", NO_STATS))
                job.end()

    def close(self) -> None:
        """End the session's thread and the runner."""
        with self._changed:
            self._is_closed = True
            waiting = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        for job in waiting:
            if isinstance(job, Job | Look | Switch | Tune):
                job.error = "the app was closed"
                job.end()
        self.runner.close()

    def _enqueue(self, job: Job | LoadRequest | Look | Switch | Tune | Weigh) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._is_tuning:
                self.runner.stop()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._jobs or self._is_suspect or self._is_closed):
                    wants = self._is_untuned and self.state.status == "ready"
                    if not self._changed.wait(IDLE_SECONDS if wants else None):
                        break
                if self._is_closed:
                    return
                if self._is_suspect:
                    self._check_worker()
                    continue
                job = self._jobs.popleft() if self._jobs else None
                self._is_tuning = job is None
                self._running = job if isinstance(job, Job | Switch | Tune) else None
                if isinstance(job, Switch | Tune):
                    job.state = "running"
                self._is_loading = isinstance(job, LoadRequest)
                self._is_load_stopped = False
            if job is None:
                self._tune()
            elif isinstance(job, LoadRequest):
                self._load_quietly(job)
            elif isinstance(job, Look):
                self._look(job)
            elif isinstance(job, Weigh):
                self._weigh()
            elif isinstance(job, Switch):
                self._switch(job)
            elif isinstance(job, Tune):
                self._retune(job)
            else:
                self._run(job)
            with self._changed:
                self._running = None
                self._is_loading = False

    def _load_quietly(self, request: LoadRequest) -> None:
        try:
            for _ in self.load(request):
                pass
            self.loaded = request
        except WorkerGone as error:
            self._restart(error)
        except MedusaChatError:
            pass  # `state` says it
        except Exception as error:  # shown on the page: the app itself goes on
            self._held = None
            self.state = ModelState("failed", message=_sentence(error))

    def _switch(self, switch: Switch) -> None:
        """Load another model; where that leaves none, the one before it again."""
        before, self._deaths, self._lost = self.loaded, 0, None
        try:
            for _ in self.load(switch.request):
                if switch.is_cancelled:
                    self.runner.stop()
            switch.model, self.loaded = self.state.model, switch.request
        except Exception as error:  # shown on the page: the app itself goes on
            gone = f"{error}, {FOR_WANT_OF_MEMORY}"
            said = gone if isinstance(error, WorkerGone) else _sentence(error)
            switch.error = STOPPED if switch.is_cancelled else said
            if self.state.status != "ready":
                self.state = ModelState("failed", message=switch.error)
        switch.end()
        if self.state.status != "ready" and before is not None and not self._is_closed:
            self._load_quietly(before)

    def _weigh(self) -> None:
        request = self.loaded or self._request
        try:
            self.memory = self.runner.room_on(request.device if request else "auto")
        except WorkerGone as error:
            self._restart(error)
        except Exception:  # no such device here: a load will say so
            self.memory = None

    def _run(self, job: Job) -> None:
        job.state = "running"
        if self._lost is not None:
            request, self._lost = self._lost, None
            self._deaths = MAX_DEATHS - 1  # one attempt, then this job says why
            self._load_quietly(request)
            self._deaths = 0
        try:
            if self.state.status != "ready":
                raise ModelError(self.state.message or "no model is loaded: load one first")
            for event in self.runner.reply(job.prompt, job.settings):
                if not job.trace:
                    job.first_seconds = time.monotonic() - job.asked_at
                job.trace.append(event)
                if job.is_cancelled:
                    self.runner.stop()
        except Exception as error:  # shown on the page: the next job still runs
            job.error = _sentence(error)
            if isinstance(error, WorkerGone):
                self._deaths = 0  # this request ended it, and the next one is another
                self._restart(error)
        finally:
            job.end()

    def _look(self, look: Look) -> None:
        try:
            if self.state.status != "ready":
                raise ModelError(self.state.message or "no model is loaded: load one first")
            if not look.is_cancelled:
                look.peek = self.runner.peek(look.request)
        except Exception as error:  # shown on the page: the next job still runs
            look.error = _sentence(error)
            if isinstance(error, WorkerGone):
                self._restart(error)
        finally:
            look.end()

    def _tune(self) -> None:
        """Time the steps while nobody asks; a job that comes stops it, and it begins anew later.

        What it finds is a gain and no promise: where it fails, all goes on as before.
        """
        try:
            for model in self.runner.tune():
                self._is_untuned = False
                self._become(model)
        except WorkerGone as error:
            self._restart(error)
        except Exception:
            self._is_untuned = False
        finally:
            with self._changed:
                self._is_tuning = False

    def _retune(self, tune: Tune) -> None:
        """What somebody asked for, and waits for: where it fails, it says why."""
        try:
            if self.state.status != "ready":
                raise ModelError(self.state.message or "no model is loaded: load one first")
            runner = self.runner
            found = runner.tune(again=True) if tune.is_measuring else runner.use_tree(tune.tree)
            for model in found:
                tune.model = model
                self._become(model)
        except Exception as error:  # shown on the page: the next job still runs
            tune.error = _sentence(error)
            if isinstance(error, WorkerGone):
                self._restart(error)
        finally:
            tune.end()

    def _become(self, model: ModelInfo) -> None:
        """The same model with another auto tree."""
        if self.state.status == "ready":
            self.state = replace(self.state, model=model)
        if self._held is not None:
            self._held = self._held[0], model

    def _suspect(self) -> None:
        """Wake the session's thread, from any thread, to look whether the worker is gone."""
        with self._changed:
            self._is_suspect = True
            self._changed.notify_all()

    def _check_worker(self) -> None:
        """Restart a worker that ended while it was idle."""
        self._is_suspect = False
        error = self.runner.gone()
        if error is not None and self.state.status == "ready":
            self._restart(error)

    def _restart(self, error: WorkerGone) -> None:
        """Load the model again, before any job that waits; give up where that cannot help."""
        with self._changed:
            self._held = None
            if self._request is None or self._is_closed:
                return
            if self.state.status == "ready" and time.monotonic() > self._ready_at + STEADY_SECONDS:
                self._deaths = 0
            self._deaths += 1
            if self._deaths < MAX_DEATHS:
                self.state = ModelState("loading", "restart", str(error))
                self._jobs.appendleft(self._request)
                return
            self._deaths, self._lost = 0, self._request
            self.state = ModelState("failed", message=f"{error}, again and again. {REMEDY}")


def _sentence(error: Exception) -> str:
    if isinstance(error, WorkerGone):
        return f"{error}. It is being restarted; your conversation is kept: send again."
    if isinstance(error, MedusaChatError):
        return str(error)
    if os.environ.get("MEDUSA_CHAT_DEBUG"):
        raise error
    return f"unexpected {type(error).__name__}: {error}"
