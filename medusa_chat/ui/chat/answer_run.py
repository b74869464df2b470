"""AnswerRun: an answer that runs, who watches it, and what is kept of it. No gradio."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from medusa_chat.decoding.events import Event
from medusa_chat.runtime.requests import Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.transcript import Transcript

GRACE_SECONDS = 20.0  # how long an answer is shown slowly that no tab shows
HIDDEN_SECONDS = 90.0  # how long one goes on without a tab: a hidden one is woken once a minute
IDLE_SECONDS = 3 * 24 * 3600.0


class Audience:
    """Who shows a conversation. streaming: how many tabs stream its answer; lock: to be held where
    that is changed, for a moment; the conversation's may wait for a disk. shown_at: when a tab
    showed it last; seen_at: when a tab was last there, whatever it showed (time.monotonic)."""

    def __init__(self) -> None:
        self.streaming = 0
        self.lock = threading.Lock()
        self.shown_at = self.seen_at = time.monotonic()

    def touch(self, is_shown: bool = True) -> None:
        """A tab is there. is_shown: and shows this conversation."""
        self.seen_at = time.monotonic()
        if is_shown:
            self.shown_at = self.seen_at

    @property
    def is_watching(self) -> bool:
        """Whether a tab shows it now, or did a moment ago."""
        return self.streaming > 0 or time.monotonic() - self.shown_at < GRACE_SECONDS

    @property
    def has_left(self) -> bool:
        """Whether no tab has been there for a while."""
        return not self.streaming and time.monotonic() - self.seen_at > HIDDEN_SECONDS

    @property
    def is_long_gone(self) -> bool:
        """Whether no tab has been there for so long that the conversation may be dropped."""
        return time.monotonic() - self.seen_at > IDLE_SECONDS


WATCH_SECONDS = 0.2  # between two looks at who shows it
KEEP_SECONDS = 5.0  # between two looks at how far it has come
INTERRUPTED = "interrupted: medusa-chat was ended"


@dataclass
class AnswerRun:
    """An answer that runs, and what is there again when nothing comes of it. text: of the user,
    for the box. before: the conversation.

    is_paced: the browser shows the answer slower than it comes, and the run lasts until `shown`
    is set. cut: how many steps were shown when it was stopped; None: it was not. replaces: the
    message that the answer goes on from.
    """

    session: Session
    job: Ticket[Event]
    answer: Answer
    text: str
    before: Transcript
    is_paced: bool = False
    replaces: int | None = None
    cut: int | None = None
    shown: threading.Event = field(default_factory=threading.Event)
    folded: int = 0  # events of the trace that are in the answer

    def follow(
        self,
        audience: Audience,
        settle: Callable[["AnswerRun"], None],
        keep: Callable[["AnswerRun"], None],
    ) -> None:
        """See it to its end in a thread, whatever tabs do, then `settle` it; `keep` it now and
        then. An answer that nobody shows is cancelled. One that ends with the session is kept as
        far as it came, and its question with it: nobody is there to take that back."""

        def watch() -> None:
            kept = time.monotonic()
            while not self.job.done.wait(WATCH_SECONDS):
                if audience.has_left:
                    self.session.cancel(self.job)
                if time.monotonic() - kept > KEEP_SECONDS:
                    keep(self)
                    kept = time.monotonic()
            if self.is_paced or self.session.is_closed:
                keep(self)
            while self.is_paced and not self.job.error and audience.is_watching:
                if self.shown.wait(WATCH_SECONDS):
                    break
            if not self.session.is_closed:
                settle(self)

        threading.Thread(target=watch, daemon=True).start()

    def stop(self, shown: int | None) -> None:
        """End it at its next step. shown: of how many steps, where a browser shows it slower than
        it comes; what came after them is dropped."""
        self.cut = shown if self.is_paced else None
        self.shown.set()
        self.session.cancel(self.job)

    def fold(self, status: Callable[[Ticket[Event]], str] = lambda job: "") -> None:
        """Fold what is new in the trace into the answer. status: what to say before any text."""
        events = self.job.trace[self.folded :]
        self.folded += len(events)
        self.answer.add(events)
        self.answer.first_seconds = self.job.first_seconds
        self.answer.say("" if self.answer.prefilled else status(self.job))

    def finish(self) -> Answer:
        """The answer as it is kept: up to where it was shown when it was stopped."""
        self.fold()
        if self.cut is not None:
            self.answer = self.answer.head(self.cut)
        return self.answer

    def so_far(self, transcript: Transcript) -> Transcript | None:
        """The conversation with as much of this answer as there is, beside the one that it goes on
        from; None before any of it."""
        if not self.job.trace:
            return None
        self.fold()
        if self.answer.is_empty:
            return None
        more = ("assistant", self.answer.text, self.answer, INTERRUPTED)
        return transcript.plus(*more, onto=self.replaces)

    def added_to(self, transcript: Transcript) -> Transcript | None:
        """The conversation with this answer; None where nothing has come of it."""
        if self.answer.is_empty and (self.note or self.answer.before or self.answer.thought):
            return None
        notes = self.answer.prefilled.notes if self.answer.prefilled else ()
        note = "; ".join(filter(None, (self.note, self.left_out, *notes)))
        more = ("assistant", self.answer.text, self.answer, note)
        said = transcript.plus(*more, onto=self.replaces)
        return said if self.replaces is None else said.without(self.replaces)

    @property
    def left_out(self) -> str:
        """That the beginning of the conversation was not read, for below it; empty where it was."""
        first = self.answer.prefilled
        if first is None or not first.left_out:
            return ""
        oldest = "message was" if first.left_out == 1 else f"{first.left_out} messages were"
        return f"the oldest {oldest} not read: the context holds {first.context:,} tokens"

    @property
    def failure(self) -> str:
        """Why it failed; empty where it did not."""
        message = self.answer.finished.message if self.answer.finished else ""
        return self.job.error or message

    @property
    def note(self) -> str:
        """Why it was cut short, for below it."""
        return f"stopped: {self.job.error}" if self.job.error else self.answer.note
