"""ChatSession: an open conversation and the answers asked for in it; tabs only show it."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from medusa_chat.decoding.events import Event
from medusa_chat.errors import UsageError
from medusa_chat.messages import TokenIds
from medusa_chat.runtime.requests import Reply, Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.runtime.stored_conversation import Said, StoredConversation
from medusa_chat.ui.access.guard import OWNER
from medusa_chat.ui.chat.answer import STOPPED, Answer, Piece, Row, pieces_before
from medusa_chat.ui.chat.answer_run import AnswerRun, Audience
from medusa_chat.ui.chat.quick_requests import branch_request, require_same_model
from medusa_chat.ui.chat.transcript import Transcript
from medusa_chat.ui.page.inputs import Inputs

BUSY = "An answer is still running: stop it, or wait for its end."
GONE = "this message no longer exists"
TOO_LONG = "this conversation has reached the limit for guests: start a new chat"
MAX_PENDING = 8
NOTHING_TO_ADD = "The model has nothing to add: its answer is complete."


class ChatSession:
    """An open conversation and the answer that runs in it. Every method may be called from any
    thread. Tabs open, reload and close; the answer neither stops nor ends twice.

    scope: whose it is. version grows with each change, transcript_version with each change of what
    has been said. A refusal is a UsageError and changes nothing. `ended` is called with each answer
    that is over, `changed` with each change of what a store keeps. is_kept: whether it may be
    written to disk; is_stored: whether it is there. is_temporary: it never is, and no list has it.
    is_pinned: it stands first in the list. settings: of its next answer, by name, as the
    page posts them; none so far: {}. most: characters that may be kept in it. pending: what waits
    to be said. number: of the next answer, never given twice. answer: the one that runs, or the
    last one shown. audience: the tabs that show it. error, news: what came of the last request
    where it is no answer. undone: what was said before each Undo of an answer or an edit, until
    something else is said.
    """

    def __init__(
        self,
        id: str,
        scope: str,
        session: Session,
        ended: Callable[["ChatSession", Answer], None],
        changed: Callable[["ChatSession", Transcript | None], None],
        number: Callable[[], int],
    ) -> None:
        self.id = id
        self.scope = scope
        self.session = session
        self.audience = Audience()
        self.transcript = Transcript()
        self.undone: list[Transcript] = []
        self.system = ""
        self.settings: dict[str, Any] = {}
        self.given_title = ""
        self.created_at = self.updated_at = time.time()
        self.error = ""
        self.news = ""
        self.version = 1
        self.transcript_version = 1
        self.is_running = False
        self.is_deleted = False
        self.is_kept = False
        self.is_stored = False
        self.is_temporary = False
        self.is_pinned = False
        self.most: int | None = None
        self.pending: list[Inputs] = []
        self.number = number
        self.answer = Answer(number())
        self._returned = ""
        self._ended = ended
        self._changed = changed
        self._run: AnswerRun | None = None
        self._lock = threading.RLock()

    # ---- what a person asks for ----

    def ask(self, inputs: Inputs) -> None:
        """Send a message; while an answer runs it waits its turn."""
        with self._lock:
            if not self.is_running:
                self._begin(inputs, self.transcript, inputs.text)
            elif len(self.pending) < MAX_PENDING:
                self._check_length(inputs.text, inputs)
                self.pending.append(inputs)
                self._keep_pending()
            else:
                raise UsageError(f"{MAX_PENDING} messages are already waiting: remove one, or wait")
            self._change()

    def drop(self, position: int, shown: object) -> None:
        """Forget the message that waits at a place, if it is still the one that was shown there."""
        with self._lock:
            if [one.shown for one in self.pending][position : position + 1] == [shown]:
                del self.pending[position]
                self._keep_pending()
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
            shown = self.transcript.tree.path
            if not shown or shown[-1].role != "assistant":
                raise UsageError("there is no answer to continue: send a message first")
            before, kept = self.transcript.last_pieces(), self.transcript.head(len(shown) - 1)
            self._begin(inputs, kept, "", before, shown[-1])

    def branch_off(self, answer: Answer, inputs: Inputs) -> None:
        """Answer again from a token of a recorded step on: another version of that answer, with its
        text up to there. inputs.place: which token, and where."""
        with self._idle():
            message, place = self.transcript.message_of(answer), inputs.place
            shown = [one.id for one in self.transcript.tree.path]
            if message not in shown or place is None:
                raise UsageError(GONE)
            require_same_model(self.session, answer)
            asked = branch_request(answer, *place)
            kept = self.transcript.head(shown.index(message))
            recorded = pieces_before(answer, *place[:2])
            said = "".join(piece for piece, _ in recorded)
            self._begin(inputs, kept, before=(*answer.before, *recorded), asked=asked, skips=said)

    def edit(self, row: Row, inputs: Inputs) -> None:
        """Change what a row shows of a message. One of the user is sent again as another version of
        it; what came after the one before stays reachable."""
        with self._idle():
            if not self.transcript.has(row):
                raise UsageError(GONE)
            if self.transcript.messages[row.position]["role"] == "user":
                self._begin(inputs, self.transcript.head(row.position), inputs.text)
            else:
                self._check_length(inputs.text)
                self._set_transcript(self.transcript.with_text(row, inputs.text))

    def end(self) -> None:
        """End the answer that runs, and forget what waits."""
        with self._lock:
            self.pending = []
            self.stop()

    def stop(self, shown: int | None = None) -> None:
        """End the answer at its next step; the text so far is kept (AnswerRun.stop)."""
        with self._lock:
            if self._run is not None:
                self._run.stop(shown)

    def end_show(self, number: int) -> None:
        """A browser has shown the answer of that number to its end."""
        if (run := self._run) is not None and run.answer.number == number:
            run.shown.set()

    # ---- what tabs do ----

    def enter(self) -> None:
        """A tab streams the answer from now on."""
        with self.audience.lock:
            self.audience.streaming += 1

    def leave(self, is_shown: bool = True) -> None:
        """A tab has stopped streaming the answer. is_shown: False where it shows another
        conversation now."""
        with self.audience.lock:
            self.audience.streaming -= 1
        self.audience.touch()
        if not is_shown:
            self.turn_away()

    def turn_away(self) -> None:
        """A tab shows another conversation now: what nobody looks at is not shown slowly."""
        if not self.audience.streaming:
            self.end_show(self.answer.number)

    def touch(self, is_shown: bool = True) -> None:
        """A tab is there. is_shown: and shows it. Messages that waited for one are sent."""
        with self._lock:
            self.audience.touch(is_shown)
            self._send_next()

    def fold(self, status: Callable[[Ticket[Event]], str] = lambda job: "") -> None:
        """Fold what is new in the trace into the answer. status: what to say before any text."""
        with self._lock:
            if self._run is not None:
                self._run.fold(status)

    @property
    def guest(self) -> str:
        """Who asks, as the queue is told; empty for the owner."""
        return "" if self.scope == OWNER else self.scope

    @property
    def is_paced(self) -> bool:
        """Whether an answer runs that the browser shows slower than it comes."""
        return (run := self._run) is not None and run.is_paced

    # ---- what is kept of it ----

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
        own = (self.system, self.settings, self.given_title, *times, self._waiting, self.is_pinned)
        return StoredConversation(transcript.tree, *own)

    def restore(self, kept: StoredConversation) -> None:
        """Become what a store kept; a message that waited there in a program that has ended goes
        into the box of whoever asks first."""
        self.transcript, self.undone = Transcript.recalled(kept.tree, self.number), []
        self.system, self.settings, self.given_title = kept.system, kept.settings, kept.given_title
        self.created_at, self.updated_at = kept.created_at, kept.updated_at
        self.is_pinned = kept.is_pinned
        self._returned = kept.waiting
        self._show_last()

    def reread(self, kept: StoredConversation) -> None:
        """Become what another program has made of it, if anything."""
        with self._lock:
            if kept.to_line() != self.stored.to_line():
                self.restore(kept)
                self.transcript_version += 1
                self._change()

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

    def set_pinned(self, is_pinned: bool) -> None:
        """Have it stand first in the list, or where its age puts it."""
        with self._lock:
            self.is_pinned = is_pinned
            self._keep()

    def set_temporary(self, is_temporary: bool) -> None:
        """Never store it, or store it from its first message on. Only while nothing was said."""
        with self._lock:
            if self.is_empty and not self.is_running:
                self.is_temporary = is_temporary
                self.is_kept = self.scope == OWNER and not is_temporary
                self._keep()

    def undo(self) -> str:
        """Take back what was done last: see Transcript.undone. Returns the user's text, for the
        message box."""
        with self._idle():
            if not self.transcript.length_before_answer():
                raise UsageError("there is nothing to undo")
            before, undone = self.transcript, self.undone
            left, text = before.undone()
            self._set_transcript(left)
            self._show_last()
            self.undone = [] if text else [*undone, before]
            return text

    def redo(self) -> None:
        """Bring back the answer or the edit that the last Undo took back."""
        with self._idle():
            if not self.undone:
                raise UsageError("there is nothing to redo")
            *undone, said = self.undone
            self._set_transcript(said)
            self._show_last()
            self.undone = undone

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

    # ---- what follows ----

    def _send_next(self) -> None:
        """Send the message that has waited longest, once no answer runs."""
        if self.pending and not self.is_running:
            inputs = self.pending.pop(0)
            try:
                self._begin(inputs, self.transcript, inputs.text)
            except UsageError as error:  # a guest has bounds
                self.pending.insert(0, inputs)
                self._return_pending()
                self._set_transcript(self.transcript, str(error))

    def _begin(
        self,
        inputs: Inputs,
        kept: Transcript,
        text: str = "",
        before: Sequence[Piece] = (),
        replaces: Said | None = None,
        asked: TokenIds | None = None,
        skips: str = "",
    ) -> None:
        """Submit a request for an answer. kept: what the conversation goes on from. text: what the
        user says then. before, replaces: text and message of the answer that is continued. asked:
        the prompt where it is known by its tokens, the first of the answer among them; skips: the
        text of those that `before` has. Raises UsageError where a guest may not ask."""
        self._check_length(text, inputs)
        answer = Answer(self.number(), before, replaces.reasoning if replaces else "", skips)
        transcript = kept.plus("user", text) if text else kept
        prompt = asked or transcript.prompt(inputs.system, answer.text, answer.reasoning)
        reply = Reply(prompt, inputs.settings, drops_oldest=True)
        job = self.session.submit(reply, self.guest)
        self.answer, self.system, self.is_running = answer, inputs.system, True
        onto = replaces.id if replaces else None
        run = (self.session, job, self.answer, text, self.transcript, inputs.is_paced, onto)
        self._run = AnswerRun(*run)
        self._say_more(transcript)
        self._run.follow(self.audience, self._settle, self._keep_so_far)

    def _keep_pending(self) -> None:
        """Write down what waits, beside the answer that runs."""
        self._changed(self, self._run and self._run.so_far(self.transcript))

    def _keep_so_far(self, run: AnswerRun) -> None:
        """Write the answer that runs as far as it has come, for a program that is ended."""
        with self._lock:
            if run is self._run and (said := run.so_far(self.transcript)) is not None:
                self._changed(self, said)

    def _settle(self, run: AnswerRun) -> None:
        """Move what was generated into the conversation; send what waits. The only place where an
        answer is committed."""
        with self._lock:
            answer = self.answer = run.finish()
            answer.is_kept, self._run, self.is_running = self.is_kept, None, False
            said = run.added_to(self.transcript)
            if said is None:
                self._returned = run.text
                is_complete = not run.failure and not run.note
                self._set_transcript(
                    self.transcript.back_to(run.before),
                    run.failure or (run.note if run.note != STOPPED else ""),
                    NOTHING_TO_ADD if is_complete else "",
                )
                self._show_last()
            else:
                self._say_more(said, run.failure)
            self._ended(self, answer)
            if run.failure or (said is None and run.text):
                self._return_pending()
            elif not self.audience.has_left:
                self._send_next()

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

    def _set_transcript(self, transcript: Transcript, error: str = "", news: str = "") -> None:
        self.transcript, self.error, self.news = transcript, error, news
        self.undone = []
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
