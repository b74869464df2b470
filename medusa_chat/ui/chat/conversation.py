"""Conversation: what was said, and all that belongs to it, while it is open. No gradio."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.runtime.stored_conversation import StoredConversation
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.transcript import Transcript
from medusa_chat.ui.page.inputs import Inputs

BUSY = "An answer is still running: stop it, or wait for its end."
GONE = "this message is not there any more"
TOO_LONG = "this conversation is as long as a guest's may be: begin a new chat"


class Conversation:
    """One conversation. scope: whose it is. Every method may be called from any thread.

    version grows with each change, transcript_version with each change of what has been said. A
    refusal is a UsageError and changes nothing. `changed` is called with each change of what a
    store keeps. settings: of its next answer, by name, as the page posts them; none so far: {}.
    most: characters that may be kept in it. pending: what waits to be said. on_disk: what the store
    holds of it. number: of the next answer, never given twice. answer: the one that runs, or the
    last one shown.
    """

    def __init__(
        self,
        id: str,
        scope: str,
        changed: Callable[[Any, Transcript | None], None],
        number: Callable[[], int],
    ) -> None:
        self.id = id
        self.scope = scope
        self.transcript = Transcript()
        self.system = ""
        self.settings: dict[str, Any] = {}
        self.given_title = ""
        self.created_at = self.updated_at = time.time()
        self.error = ""
        self.version = 1
        self.transcript_version = 1
        self.is_running = False
        self.is_deleted = False
        self.on_disk: StoredConversation | None = None
        self.most: int | None = None
        self.pending: list[Inputs] = []
        self._returned = ""
        self.number = number
        self.answer = Answer(number())
        self._changed = changed
        self._lock = threading.RLock()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever said in it: it is neither stored nor listed."""
        return not self.transcript.tree.said

    @property
    def stored(self) -> StoredConversation:
        """The conversation as the store on disk keeps it."""
        return self.stored_as(self.transcript)

    def stored_as(self, transcript: Transcript) -> StoredConversation:
        """As `stored`, with another transcript."""
        times = (self.created_at, self.updated_at)
        own = (self.system, self.settings, self.given_title, *times, self._waiting)
        return StoredConversation(transcript.tree, *own)

    def restore(self, kept: StoredConversation) -> None:
        """Become what a store kept."""
        self.transcript = Transcript.recalled(kept.tree, self.number)
        self.system, self.settings, self.given_title = kept.system, kept.settings, kept.given_title
        self.created_at, self.updated_at = kept.created_at, kept.updated_at
        if self.on_disk is None:
            self._returned = kept.waiting  # in a program that has ended
        self.on_disk = kept
        self._show_last()

    def adopt(self, kept: StoredConversation, unsaid: int = 0) -> None:
        """Take what the store holds since a save, another program's messages too. An answer that
        runs goes on where it was asked for. unsaid: a message that is on disk alone."""
        self.on_disk = kept
        tree = kept.tree.without(unsaid) if unsaid else kept.tree
        leaf = self.transcript.tree.leaf if self.is_running else tree.leaf
        if (tree.said, leaf) != (self.transcript.tree.said, self.transcript.tree.leaf):
            self.transcript = self.transcript.grown(replace(tree, leaf=leaf), self.number)
            self.transcript_version += 1
            self._change()
        self.system, self.settings, self.given_title = kept.system, kept.settings, kept.given_title

    def reread(self, kept: StoredConversation, seen: StoredConversation) -> bool:
        """Become what another program made of it; whether there was anything. Not while an answer
        runs. seen: what was on disk before `kept` was read, of which nothing was saved since."""
        with self._lock:
            if self.is_running or self.on_disk is not seen or kept.to_line() == seen.to_line():
                return False
            self.restore(kept)
            self.transcript_version += 1
            self._change()
            return True

    def save(self) -> None:
        """Have the store keep it as it is."""
        with self._lock:
            self._changed(self, None)

    def rename(self, title: str) -> None:
        """Give it a title; an empty one: that of its first message again."""
        with self._lock:
            self.given_title = title
            self._keep()

    def set_system(self, text: str) -> None:
        """Set the system prompt of the turns to come."""
        with self._lock:
            if text != self.system:
                self._check_length(system=text)
                self.system = text
                self._keep()

    def set_settings(self, settings: dict[str, Any]) -> None:
        """Remember the settings of the answers to come; tabs that are open keep their own."""
        with self._lock:
            if settings != self.settings:
                self.settings = settings
                if not self.is_empty:
                    self._changed(self, None)

    def set_deleted(self, is_deleted: bool) -> None:
        """Take it out of the lists, or back in; what was said stays until it is removed."""
        with self._lock:
            self.is_deleted = is_deleted
            self._keep()

    def undo(self) -> str:
        """Take back what was done last: see Transcript.undone. Returns the user's text, for the
        message box."""
        with self._idle():
            if not self.transcript.length_before_answer():
                raise UsageError("there is nothing to undo")
            left, text = self.transcript.undone()
            self._set_transcript(left)
            self._show_last()
            return text

    def show_version(self, position: int, version: int) -> None:
        """Show another version of a message, from 1, and what came after it."""
        with self._idle():
            try:
                shown = self.transcript.showing(position, version)
            except IndexError:
                raise UsageError(GONE) from None
            self._set_transcript(shown)
            self._show_last()

    def pop_returned(self) -> str:
        """A message that came to nothing, for the box of whoever asks first."""
        with self._lock:
            if text := self._returned:
                self._returned = ""
                self._changed(self, None)
            return text

    @property
    def _waiting(self) -> str:
        """What was sent and is not said: with a program that ends it comes to nothing."""
        texts = (self._returned, *(inputs.text for inputs in self.pending))
        return "\n\n".join(filter(None, texts))

    def _return_pending(self) -> None:
        """What waits was written for an answer that does not come: it comes to nothing too."""
        self._returned, self.pending = self._waiting, []

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """The lock of this conversation; refused while an answer runs."""
        with self._lock:
            if self.is_running:
                raise UsageError(BUSY)
            yield

    def _check_length(self, text: str = "", inputs: Inputs | None = None, system: str = "") -> None:
        """Refuse what would make it longer than it may be. text: to be said; inputs: of an answer
        or a message that waits; system: the prompt from now on, where no inputs have one."""
        if self.most is not None:
            said = self.transcript.tree.said.values()
            told = sum(len(one.content) + len(one.reasoning) for one in said)
            waiting = sum(len(one.text) + one.overhead for one in self.pending)
            more = len(text) + (inputs.overhead if inputs else len(system))
            if told + waiting + more > self.most:
                raise UsageError(TOO_LONG)

    def _say_more(self, transcript: Transcript, error: str = "") -> None:
        """Set what has been said, now: the conversation is the latest again."""
        self.updated_at = time.time()
        self._set_transcript(transcript, error)

    def _set_transcript(self, transcript: Transcript, error: str = "") -> None:
        self.transcript, self.error = transcript, error
        self.transcript_version += 1
        self._keep()

    def _show_last(self) -> None:
        """The last answer of the messages shown is the one whose steps are shown."""
        self.answer = self.transcript.last_answer or Answer(self.number())

    def _keep(self) -> None:
        self._changed(self, None)
        self._change()

    def _change(self) -> None:
        self.version += 1
