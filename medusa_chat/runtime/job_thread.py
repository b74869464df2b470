"""JobThread: a session's own thread. It takes jobs from the queue and does one after the other."""

import logging
import os
import threading
import time

from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.model_lifecycle import ModelLifecycle
from medusa_chat.runtime.runner import WorkerGone
from medusa_chat.runtime.scheduler import Asked, Job, Look, ModelState, Queue, Switch, Tune, Weigh

IDLE_SECONDS = 2.0  # without a job, before the model's steps are timed
FOR_WANT_OF_MEMORY = (
    "most likely for want of memory: choose int8 or nf4, a smaller context or a smaller model"
)
STOPPED = "stopped: the model that was there before is used"


class JobThread:
    """Begun by the first job. Where one fails, it says why, and the next one is done."""

    def __init__(self, queue: Queue, keeper: ModelLifecycle, tunes: bool) -> None:
        """tunes: whether the model's steps are timed once after a load, when nobody asks."""
        self._queue, self._keeper, self._runner = queue, keeper, keeper.runner
        self._tunes, self._is_tuning = tunes, False
        self._is_suspect = False  # the worker may be gone: to be asked
        self._thread: threading.Thread | None = None

    def attend(self) -> None:
        """Something waits in the queue, whose lock is held: timing that nobody asked for ends."""
        if self._is_tuning:
            self._runner.stop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def suspect(self) -> None:
        """Wake the thread, from any other, to look whether the worker is gone."""
        with self._queue.changed:
            self._is_suspect = True
            self._queue.changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._queue.changed:
                self._wait()
                if self._queue.is_closed:
                    return
                if self._is_suspect:
                    self._check_worker()
                    continue
                job = self._queue.take()
                self._is_tuning = job is None
                self._keeper.is_load_stopped = False
            self._do(job)
            self._queue.done()

    def _wait(self) -> None:
        """Until there is something to do, or the time to tune."""
        while not (self._queue or self._is_suspect or self._queue.is_closed):
            is_ready = self._keeper.state.status == "ready"
            wants = self._tunes and self._keeper.is_untuned and is_ready
            if not self._queue.changed.wait(IDLE_SECONDS if wants else None):
                return

    def _check_worker(self) -> None:
        """Restart a worker that ended while it was idle."""
        self._is_suspect = False
        error = self._runner.gone()
        if error is not None and self._keeper.state.status == "ready":
            self._restart(error)

    def _restart(self, error: WorkerGone) -> None:
        """Load the model again, before any job that waits; give up where that cannot help."""
        with self._queue.changed:
            again = None if self._queue.is_closed else self._keeper.bring_back(error)
            if again is not None:
                self._queue.put(again, is_next=True)

    def _do(self, job: Asked | None) -> None:
        if job is None:
            self._tune_unasked()
        elif isinstance(job, LoadRequest):
            self._load(job)
        elif isinstance(job, Weigh):
            self._weigh()
        elif isinstance(job, Switch):
            self._switch(job)
        else:
            self._ask_model(job)

    def _load(self, request: LoadRequest) -> None:
        try:
            for _ in self._keeper.load(request):
                pass
            self._keeper.loaded = request
        except WorkerGone as error:
            self._restart(error)
        except MedusaChatError:
            pass  # the keeper's state says it
        except Exception as error:  # shown on the page: the app itself goes on
            self._keeper.fail(_sentence(error))

    def _switch(self, switch: Switch) -> None:
        """Load another model; where that leaves none, the one before it again."""
        keeper = self._keeper
        before = keeper.loaded
        keeper.forgive()
        try:
            for _ in keeper.load(switch.request):
                if switch.is_cancelled:
                    self._runner.stop()
            switch.model, keeper.loaded = keeper.state.model, switch.request
        except Exception as error:  # shown on the page: the app itself goes on
            gone = f"{error}, {FOR_WANT_OF_MEMORY}"
            said = gone if isinstance(error, WorkerGone) else _sentence(error)
            switch.error = STOPPED if switch.is_cancelled else said
            if keeper.state.status != "ready":
                keeper.state = ModelState("failed", message=switch.error)
        switch.end()
        if keeper.state.status != "ready" and before is not None and not self._queue.is_closed:
            self._load(before)

    def _weigh(self) -> None:
        try:
            self._keeper.weigh()
        except WorkerGone as error:
            self._restart(error)

    def _tune_unasked(self) -> None:
        """Time the steps while nobody asks; a job that comes stops it, and it begins anew later.

        What it finds is a gain and no promise: where it fails, all goes on as before.
        """
        try:
            for model in self._runner.tune():
                self._keeper.is_untuned = False
                self._keeper.become(model)
        except WorkerGone as error:
            self._restart(error)
        except Exception as error:
            self._keeper.is_untuned = False
            logging.getLogger(__name__).warning("the steps could not be timed: %s", error)
        finally:
            with self._queue.changed:
                self._is_tuning = False

    def _ask_model(self, job: Job | Look | Tune) -> None:
        """What somebody waits for, of the model that is there: where it fails, it says why."""
        if isinstance(job, Job):
            self._try_lost()
        try:
            self._keeper.require()
            if isinstance(job, Job):
                self._reply(job)
            elif isinstance(job, Tune):
                self._tune(job)
            elif not job.is_cancelled:
                job.peek = self._runner.peek(job.request)
        except Exception as error:  # shown on the page: the next job still runs
            job.error = _sentence(error)
            if isinstance(error, WorkerGone):
                if isinstance(job, Job):
                    self._keeper.forgive()  # this request ended it, and the next one is another
                self._restart(error)
        finally:
            job.end()

    def _try_lost(self) -> None:
        """One attempt at a load that was given up; where it fails, the job that waits says why."""
        request = self._keeper.last_attempt()
        if request is not None:
            self._load(request)
            self._keeper.forgive()

    def _reply(self, job: Job) -> None:
        for event in self._runner.reply(job.prompt, job.settings):
            if not job.trace:
                job.first_seconds = time.monotonic() - job.asked_at
            job.trace.append(event)
            if job.is_cancelled:
                self._runner.stop()

    def _tune(self, tune: Tune) -> None:
        runner = self._runner
        found = runner.tune(again=True) if tune.is_measuring else runner.use_tree(tune.tree)
        for model in found:
            tune.model = model
            self._keeper.become(model)


def _sentence(error: Exception) -> str:
    if isinstance(error, WorkerGone):
        return f"{error}. It is being restarted; your conversation is kept: send again."
    if isinstance(error, MedusaChatError):
        return str(error)
    if os.environ.get("MEDUSA_CHAT_DEBUG"):
        raise error
    return f"unexpected {type(error).__name__}: {error}"
