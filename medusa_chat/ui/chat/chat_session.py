"""ChatSession: an open conversation and the answers asked for in it, which tabs only show."""

from collections.abc import Callable, Sequence

from medusa_chat.decoding.events import Event
from medusa_chat.errors import UsageError
from medusa_chat.runtime.requests import Reply, Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.runtime.stored_conversation import Said
from medusa_chat.ui.access.guard import OWNER
from medusa_chat.ui.chat.answer import STOPPED, Answer, Piece, Row
from medusa_chat.ui.chat.answer_run import AnswerRun
from medusa_chat.ui.chat.audience import Audience
from medusa_chat.ui.chat.conversation import GONE, Conversation
from medusa_chat.ui.chat.transcript import Transcript
from medusa_chat.ui.page.inputs import Inputs

MAX_PENDING = 8
NOTHING_TO_ADD = "the model has nothing to add: its answer is complete"


class ChatSession(Conversation):
    """A conversation and the answer that runs in it. Every method may be called from any thread.
    Tabs open, reload and close; the answer neither stops nor ends twice. No gradio.

    `ended` is called with each answer that is over. is_kept: whether it may be written to disk.
    audience: the tabs that show it.
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
        super().__init__(id, scope, changed, number)
        self.session = session
        self.audience = Audience()
        self.is_kept = False
        self._ended = ended
        self._run: AnswerRun | None = None

    # ---- what a person does ----

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
    def is_paced(self) -> bool:
        """Whether an answer runs that the browser shows slower than it comes."""
        return (run := self._run) is not None and run.is_paced

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
    ) -> None:
        """Submit a request for an answer. kept: what the conversation goes on from. text: what the
        user says then. before, replaces: text and message of the answer that is continued. Raises
        UsageError where a guest may not ask."""
        self._check_length(text, inputs)
        answer = Answer(self.number(), before, replaces.reasoning if replaces else "")
        transcript = kept.plus("user", text) if text else kept
        asked = transcript.prompt(inputs.system, answer.text, answer.reasoning)
        reply = Reply(asked, inputs.settings, drops_oldest=True)
        job = self.session.submit(reply, "" if self.scope == OWNER else self.scope)
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
                why = "" if run.note == STOPPED else run.note or NOTHING_TO_ADD
                self._set_transcript(self.transcript.back_to(run.before), run.failure or why)
                self._show_last()
            else:
                self._say_more(said, run.failure)
            self._ended(self, answer)
            if run.failure or (said is None and run.text):
                self._return_pending()
            elif not self.audience.has_left:
                self._send_next()
