"""ChatSession: one browser's conversation and the answer that runs, kept by the server. No gradio.

Tabs only show it: they open, reload and close, and the answer neither stops nor ends twice.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from medusa_chat.decoding.events import Event
from medusa_chat.errors import UsageError
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.scheduler import Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat.answer import Answer, Piece
from medusa_chat.ui.chat.transcript import Transcript, Turn
from medusa_chat.ui.page.inputs import Inputs

GRACE_SECONDS = 20.0  # how long an answer goes on that no tab shows
WATCH_SECONDS = 0.2  # between two checks of that
IDLE_SECONDS = 3 * 24 * 3600.0
MAX_PENDING = 8
NOTHING_TO_ADD = "the model has nothing to add: its answer is complete"
BUSY = "An answer is still running: stop it, or wait for its end."


class ChatSession:
    """One browser's conversation. Every method may be called from any thread.

    version grows with each change, transcript_version with each change of what has been said. A
    refusal is a UsageError and changes nothing. is_kept: whether it may be written to disk;
    `changed` is called with each change of what would be written.
    """

    def __init__(
        self,
        token: str,
        session: Session,
        ended: Callable[[Answer], None],
        changed: Callable[["ChatSession"], None] = lambda chat: None,
    ) -> None:
        self.token = token
        self.session = session
        self.transcript = Transcript()
        self.answer = Answer()
        self.pending: list[Inputs] = []
        self.system = ""
        self.error = ""
        self.version = 1
        self.transcript_version = 1
        self.is_running = False
        self.is_kept = False  # until its owner has come
        self.seen_at = time.monotonic()
        self._ended = ended
        self._changed = changed
        self._watching = 0
        self._job: Ticket[Event] | None = None
        self._turn: Turn | None = None
        self._taken = 0
        self._returned = ""
        self._lock = threading.RLock()

    # ---- what a person does ----

    def ask(self, inputs: Inputs) -> None:
        """Send a message; while an answer runs it waits its turn."""
        with self._lock:
            if self.is_running and len(self.pending) >= MAX_PENDING:
                raise UsageError(f"{MAX_PENDING} messages wait already: drop one, or let them go")
            if self.is_running:
                self.pending.append(inputs)
            else:
                self._begin(inputs, self.transcript, inputs.text)
            self._change()

    def drop(self, position: int) -> None:
        """Forget a message that waits."""
        with self._lock:
            if position < len(self.pending):
                del self.pending[position]
                self._change()

    def regenerate(self, inputs: Inputs) -> None:
        """Answer the last message of the user again."""
        with self._idle():
            length = self.transcript.length_before_answer()
            if not length:
                raise UsageError("there is no answer to regenerate: send a message first")
            self._begin(inputs, self.transcript.head(length))

    def proceed(self, inputs: Inputs) -> None:
        """Go on with the last answer: its text stays, new tokens come after it."""
        with self._idle():
            position = len(self.transcript.messages) - 1
            if position < 0 or self.transcript.messages[position]["role"] != "assistant":
                raise UsageError("there is no answer to continue: send a message first")
            text, last = (
                self.transcript.messages[position]["content"],
                self.transcript.answers.get(position),
            )
            before = last.pieces if last and last.text == text else [(text, 0)]
            self._begin(inputs, self.transcript.head(position), before=before)

    def undo(self) -> str:
        """Remove the last turn; returns the user's text, for the message box."""
        with self._idle():
            length = self.transcript.length_before_answer()
            if not length:
                raise UsageError("there is nothing to undo")
            text = self.transcript.messages[length - 1]["content"]
            self._set_transcript(self.transcript.head(length - 1))
            return text

    def edit(self, position: int, inputs: Inputs) -> None:
        """Change a message. One of the user is sent again, and what came after it is dropped."""
        with self._idle():
            if position >= len(self.transcript.messages):
                raise UsageError("this message is not there any more")
            if self.transcript.messages[position]["role"] == "user":
                self._begin(inputs, self.transcript.head(position), inputs.text)
                return
            self._set_transcript(self.transcript.with_text(position, inputs.text))

    def clear(self) -> None:
        """A new conversation; the answer that runs is ended, the system prompt stays."""
        with self._lock:
            if self._job is not None:
                self.session.cancel(self._job)
            self._job, self._turn, self.is_running = None, None, False
            self.pending, self._returned = [], ""
            self.answer = Answer(self.answer.number + 1)
            self._set_transcript(Transcript())

    def stop(self, shown: int | None = None) -> None:
        """End the answer at its next step; the text so far is kept. shown: of how many steps,
        where a browser shows it slower than it comes; what came after them is dropped."""
        with self._lock:
            if self._job is None or self._turn is None:
                return
            self._turn.cut = shown if self._turn.is_paced else None
            self._turn.shown.set()
            self.session.cancel(self._job)

    def end_show(self, number: int) -> None:
        """A browser has shown the answer of that number to its end."""
        with self._lock:
            if self._turn is not None and self.answer.number == number:
                self._turn.shown.set()

    def set_system(self, text: str) -> None:
        """Set the system prompt of the turns to come."""
        with self._lock:
            if text != self.system:
                self.system = text
                self._changed(self)
                self._change()

    # ---- what tabs do ----

    def enter(self) -> None:
        """A tab streams the answer from now on."""
        with self._lock:
            self._watching += 1

    def leave(self) -> None:
        """A tab has stopped streaming the answer."""
        with self._lock:
            self._watching -= 1
            self.seen_at = time.monotonic()

    def touch(self) -> None:
        """A tab is there. Messages that waited for one are sent."""
        with self._lock:
            self.seen_at = time.monotonic()
            if self.pending and not self.is_running:
                self._begin_next()

    def fold(self, status: Callable[[Ticket[Event]], str] = lambda job: "") -> None:
        """Fold what is new in the trace into the answer. status: what to say before any text."""
        with self._lock:
            if self._job is None:
                return
            events = self._job.trace[self._taken :]
            self._taken += len(events)
            self.answer.add(events)
            self.answer.first_seconds = self._job.first_seconds
            self.answer.say("" if self.answer.prefilled else status(self._job))

    def pop_returned(self) -> str:
        """A message that came to nothing, for the box of whoever asks first."""
        with self._lock:
            text, self._returned = self._returned, ""
            return text

    @property
    def is_paced(self) -> bool:
        """Whether an answer runs that the browser shows slower than it comes."""
        turn = self._turn
        return turn is not None and turn.is_paced

    @property
    def is_left(self) -> bool:
        """Whether no tab has shown it for a while."""
        return not self._watching and time.monotonic() - self.seen_at > GRACE_SECONDS

    @property
    def is_idle(self) -> bool:
        """Whether it has gone unused for so long that it may be dropped."""
        return not self.is_running and time.monotonic() - self.seen_at > IDLE_SECONDS

    # ---- what follows ----

    def _begin_next(self) -> None:
        """Send the message that has waited longest."""
        inputs = self.pending.pop(0)
        self._begin(inputs, self.transcript, inputs.text)

    def _begin(
        self, inputs: Inputs, kept: Transcript, text: str = "", before: Sequence[Piece] = ()
    ) -> None:
        """Submit a request for an answer. kept: what the conversation goes on from. text: what the
        user says then. before: the text of the answer that is continued."""
        self._turn, self._taken = Turn(text, self.transcript, inputs.is_paced), 0
        self.is_running = True
        self.answer = Answer(self.answer.number + 1, before)
        self.system = inputs.system
        transcript = kept.plus("user", text) if text else kept
        messages = list(transcript.messages)
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        if self.answer.text:
            messages.append({"role": "assistant", "content": self.answer.text})
        self._job = self.session.submit(Reply(messages, inputs.settings))
        self._set_transcript(transcript)
        follower = threading.Thread(target=self._follow, args=(self._job,), daemon=True)
        follower.start()

    def _follow(self, job: Ticket[Event]) -> None:
        """See an answer to its end, whatever tabs do. The only place where one is committed."""
        while not job.done.wait(WATCH_SECONDS):
            if self.is_left:
                self.session.cancel(job)
        self._wait_shown(job)
        with self._lock:
            if job is self._job:
                self._settle(job)

    def _wait_shown(self, job: Ticket[Event]) -> None:
        """Until a browser has shown the answer, where it does so slower than it came."""
        turn = self._turn
        while turn is not None and turn.is_paced and not job.error and not self.is_left:
            if turn.shown.wait(WATCH_SECONDS) or job is not self._job:
                return

    def _settle(self, job: Ticket[Event]) -> None:
        """Move what was generated into the conversation; send what waits."""
        self.fold()
        answer, turn = self.answer, self._turn
        assert turn is not None
        if turn.cut is not None:
            self.answer = answer = answer.head(turn.cut)
        self._job, self._turn, self.is_running = None, None, False
        answer.is_kept = self.is_kept
        self._ended(answer)
        note = f"stopped: {job.error}" if job.error else answer.note
        failed = job.error or (answer.finished.message if answer.finished else "")
        if answer.is_empty and (note or answer.before):
            self._returned = turn.text
            self._set_transcript(turn.before, failed or note or NOTHING_TO_ADD)
        else:
            self._set_transcript(
                self.transcript.plus("assistant", answer.text, answer, note), failed
            )
        if failed:  # what waits was written for an answer that is not there
            self._returned = "\n\n".join(
                text for text in (self._returned, *(i.text for i in self.pending)) if text
            )
            self.pending = []
        elif self.pending and not self.is_left:
            self._begin_next()

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """The lock of this chat session; refused while an answer runs."""
        with self._lock:
            if self.is_running:
                raise UsageError(BUSY)
            yield

    def _set_transcript(self, transcript: Transcript, error: str = "") -> None:
        self.transcript, self.error = transcript, error
        self.transcript_version += 1
        self._changed(self)
        self._change()

    def _change(self) -> None:
        self.version += 1
