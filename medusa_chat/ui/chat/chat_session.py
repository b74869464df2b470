"""ChatSession: a conversation that is open, and the answer that runs in it. No gradio.

Tabs only show it: they open, reload and close, and the answer neither stops nor ends twice.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from medusa_chat.decoding.events import Event
from medusa_chat.errors import UsageError
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.scheduler import Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.runtime.stored_conversation import StoredConversation
from medusa_chat.ui.chat.answer import Answer, Piece
from medusa_chat.ui.chat.conversation import GONE, Conversation
from medusa_chat.ui.chat.transcript import Transcript, Turn
from medusa_chat.ui.page.inputs import Inputs

GRACE_SECONDS = 20.0  # how long an answer goes on that no tab shows
WATCH_SECONDS = 0.2  # between two checks of that
IDLE_SECONDS = 3 * 24 * 3600.0
MAX_PENDING = 8
NOTHING_TO_ADD = "the model has nothing to add: its answer is complete"
TOO_LONG = "this conversation is as long as a guest's may be: begin a new chat"


class ChatSession(Conversation):
    """A conversation and the answer that runs in it. Every method may be called from any thread.

    `ended` is called with each answer that is over. number: of the next answer, never given twice.
    is_kept: whether it may be written to disk. most: characters that may be said in it.
    """

    def __init__(
        self,
        id: str,
        scope: str,
        session: Session,
        ended: Callable[["ChatSession", Answer], None],
        changed: Callable[["ChatSession"], None] = lambda chat: None,
        number: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(id, scope, changed)
        self.session = session
        self.number = number or itertools.count(1).__next__
        self.answer = Answer(self.number())
        self.pending: list[Inputs] = []
        self.is_kept = False
        self.most: int | None = None
        self.shown_at = time.monotonic()
        self._ended = ended
        self._watching = 0
        self._job: Ticket[Event] | None = None
        self._turn: Turn | None = None
        self._taken = 0
        self._returned = ""

    def restore(self, kept: StoredConversation, number: Callable[[], int] | None = None) -> None:
        """Become what a store kept; its last answer is the one that is shown."""
        super().restore(kept, number or self.number)
        self.answer = self.transcript.last_answer or self.answer

    # ---- what a person does ----

    def ask(self, inputs: Inputs) -> None:
        """Send a message; while an answer runs it waits its turn."""
        with self._lock:
            self._check_length(inputs.text)
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
            replaces = self.transcript.tree.path[position].id
            self._begin(inputs, self.transcript.head(position), "", before, replaces)

    def undo(self) -> str:
        """Remove the last turn; returns the user's text, for the message box."""
        with self._idle():
            length = self.transcript.length_before_answer()
            if not length:
                raise UsageError("there is nothing to undo")
            text = self.transcript.messages[length - 1]["content"]
            gone = self.transcript.tree.path[length - 1].id
            self._set_transcript(self.transcript.without(gone))
            return text

    def edit(self, position: int, inputs: Inputs) -> None:
        """Change a message. One of the user is sent again as another version of it; what came
        after the one before stays reachable."""
        with self._idle():
            if position >= len(self.transcript.messages):
                raise UsageError(GONE)
            self._check_length(inputs.text)
            if self.transcript.messages[position]["role"] == "user":
                self._begin(inputs, self.transcript.head(position), inputs.text)
                return
            self._set_transcript(self.transcript.with_text(position, inputs.text))

    def show_version(self, position: int, version: int) -> None:
        """Show another version of a message, with the steps of the answer it comes to."""
        with self._lock:
            super().show_version(position, version)
            self.answer = self.transcript.last_answer or self.answer

    def end(self) -> None:
        """End the answer that runs, and forget what waits."""
        with self._lock:
            self.pending = []
            self.stop()

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

    # ---- what tabs do ----

    def enter(self) -> None:
        """A tab streams the answer from now on."""
        with self._lock:
            self._watching += 1

    def leave(self, is_shown: bool = True) -> None:
        """A tab has stopped streaming the answer. is_shown: False where it shows another
        conversation now."""
        with self._lock:
            self._watching -= 1
            self.seen_at = self.shown_at = time.monotonic()
            if not is_shown:
                self.turn_away()

    def turn_away(self) -> None:
        """A tab shows another conversation now: what nobody looks at is not shown slowly."""
        with self._lock:
            if not self._watching:
                self.end_show(self.answer.number)

    def touch(self) -> None:
        """A tab shows it."""
        self.shown_at = time.monotonic()
        self.keep_alive()

    def keep_alive(self) -> None:
        """A tab is there, whatever it shows. Messages that waited for one are sent."""
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
        self,
        inputs: Inputs,
        kept: Transcript,
        text: str = "",
        before: Sequence[Piece] = (),
        replaces: int | None = None,
    ) -> None:
        """Submit a request for an answer. kept: what the conversation goes on from. text: what the
        user says then. before, replaces: text and message of the answer that is continued."""
        self._turn = Turn(text, self.transcript, inputs.is_paced, replaces=replaces)
        self._taken, self.is_running = 0, True
        self.answer = Answer(self.number(), before)
        self.system = inputs.system
        transcript = kept.plus("user", text) if text else kept
        messages = list(transcript.messages)
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        if self.answer.text:
            messages.append({"role": "assistant", "content": self.answer.text})
        self._job = self.session.submit(Reply(messages, inputs.settings))
        self._say_more(transcript)
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
        while turn is not None and turn.is_paced and not job.error:
            is_shown = self._watching or time.monotonic() - self.shown_at < GRACE_SECONDS
            if not is_shown or turn.shown.wait(WATCH_SECONDS) or job is not self._job:
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
        note = f"stopped: {job.error}" if job.error else answer.note
        failed = job.error or (answer.finished.message if answer.finished else "")
        if answer.is_empty and (note or answer.before):
            self._returned = turn.text
            self._set_transcript(turn.before, failed or note or NOTHING_TO_ADD)
        else:
            said = self.transcript.plus("assistant", answer.text, answer, note)
            is_continued = turn.replaces is not None
            self._say_more(said.without(turn.replaces) if is_continued else said, failed)
        self._ended(self, answer)
        if failed:  # what waits was written for an answer that is not there
            self._returned = "\n\n".join(
                text for text in (self._returned, *(i.text for i in self.pending)) if text
            )
            self.pending = []
        elif self.pending and not self.is_left:
            self._begin_next()

    def _check_length(self, text: str) -> None:
        """Refuse more than may be said here."""
        if self.most is not None:
            said = sum(len(one.content) for one in self.transcript.tree.said.values())
            if said + len(text) > self.most:
                raise UsageError(TOO_LONG)
