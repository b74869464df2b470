"""Session: the one door of every front end to a model. One queue of jobs, append-only traces.

Behind it stands a runner (runner.py, process.py): the model in this process, or in a child process
of its own. This module never imports torch.
"""

from collections.abc import Iterator

from medusa_chat.decoding.events import Event, Finished, Stats
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import LoadStopped, ModelError
from medusa_chat.messages import (
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    Peek,
    PeekRequest,
    PersonalTree,
    Prompt,
)
from medusa_chat.runtime.job_thread import STOPPED, JobThread
from medusa_chat.runtime.model_lifecycle import ModelLifecycle
from medusa_chat.runtime.runner import Runner
from medusa_chat.runtime.scheduler import Asked, Job, Look, ModelState, Queue, Switch, Tune, Weigh

NO_STATS = Stats(0, 0, None, 0.0, 0.0, None)


class Session:
    """One model and the jobs that want it, first come first served."""

    def __init__(self, runner: Runner, tunes: bool = False) -> None:
        """tunes: whether the model's steps are timed once after a load, when nobody asks."""
        self.runner = runner
        self.keeper = ModelLifecycle(runner)
        self._queue = Queue()
        self._thread = JobThread(self._queue, self.keeper, tunes)
        runner.on_gone = self._thread.suspect

    @property
    def state(self) -> ModelState:
        """What the page shows of the model."""
        return self.keeper.state

    @property
    def request(self) -> LoadRequest | None:
        """What was asked for last; None before anything was."""
        return self.keeper.request

    @property
    def loaded(self) -> LoadRequest | None:
        """What the model that is there was asked by."""
        return self.keeper.loaded

    @property
    def memory(self) -> DeviceMemory | None:
        """As it was when somebody asked last."""
        return self.keeper.memory

    def load(self, request: LoadRequest) -> Iterator[LoadPhase]:
        """Load at once, in this thread; raises what the worker refuses."""
        return self.keeper.load(request)

    def reply(self, prompt: Prompt, settings: GenerationSettings) -> Iterator[Event]:
        """Answer at once, in this thread. Closing the iterator cancels."""
        return self.runner.reply(prompt, settings)

    def submit(self, prompt: Prompt, settings: GenerationSettings) -> Job:
        """Queue a job for the session's own thread and return it at once."""
        job = Job(prompt, settings)
        self._enqueue(job)
        return job

    def submit_load(self, request: LoadRequest) -> None:
        """Queue a load for the session's own thread; `state` follows it."""
        with self._queue.changed:
            self.keeper.request = self.keeper.request or request
            if self._queue.running is None and not self._queue:
                self.keeper.state = ModelState("loading", "start")
        self._enqueue(request)

    def stop_load(self) -> None:
        """End the load that runs, and those that wait; `state` says what is there then."""
        with self._queue.changed:
            was_waiting = self._queue.remove_all(LoadRequest)
            if self._queue.is_loading:
                self.keeper.stop_load()
            elif was_waiting and self.state.status == "loading":
                self.keeper.fall_back(LoadStopped("loading was stopped before it began"))

    def submit_switch(self, request: LoadRequest) -> Switch:
        """Queue the change to another model behind what is asked already; returns at once."""
        switch = Switch(request)
        self._enqueue(switch)
        return switch

    def cancel(self, switch: Switch) -> None:
        """Give a switch up: at once while it waits, else within a second; the model before it is
        loaded again. What was ready already stays."""
        with self._queue.changed:
            switch.is_cancelled = True
            if self._queue.remove(switch):
                switch.error = STOPPED
                switch.end()
            elif switch is self._queue.running:
                self.runner.stop()

    def ask_memory(self) -> None:
        """Let `memory` be looked at again when the model is free; returns at once."""
        if not self._queue.has(Weigh):
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
        return self._queue.position(job)

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
        with self._queue.changed:
            job.is_cancelled = True
            if job is self._queue.running:
                self.runner.stop()
            elif self._queue.remove(job):
                job.trace.append(Finished("cancelled", (), "", "", NO_STATS))
                job.end()

    def close(self) -> None:
        """End the session's thread and the runner."""
        self._queue.close("the app was closed")
        self.runner.close()

    def _enqueue(self, job: Asked) -> None:
        with self._queue.changed:
            self._queue.put(job)
            self._thread.attend()
