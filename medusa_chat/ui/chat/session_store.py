"""SessionStore: the open conversations, found by owner and id. No gradio.

A scope is who asks: OWNER, or a guest (guard.guest_of). The owner's are the data folder's: every
browser of theirs has the same ones, and what is dropped from memory here stays on disk. Those of a
guest are in memory only.
"""

import itertools
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from medusa_chat.errors import UsageError
from medusa_chat.runtime.history import History
from medusa_chat.runtime.session import Session
from medusa_chat.runtime.stored_conversation import StoredConversation
from medusa_chat.runtime.traces import StepStore
from medusa_chat.ui.access.guard import OWNER
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.transcript import Transcript
from medusa_chat.ui.page.inputs import ID

MAX_SESSIONS = 200  # of the owner in memory
MAX_GUEST_SESSIONS = 200  # of all guests
MAX_OF_ONE_GUEST = 20
MAX_GUEST_CHARACTERS = 200_000  # in one conversation: more than a context holds
AGAIN_SECONDS = 20.0  # between two tries to save what the disk did not take
MAX_STEPS_KEPT = 8000  # of finished answers, all sessions: a step of 64 nodes takes about 16 KB

NOT_OWNED = (
    "{} has the conversations open: they are read-only here, and new chats are not saved. "
    "To use them here, close the other program, then reload this page."
)
READ_ONLY = (
    "This conversation is read-only here: {} has it open. Continue there, or start a new chat, "
    "which is not saved; to continue here, close the other program and try again."
)
CHANGED = "Another medusa-chat has changed this conversation: check it, then try again."
OWNED = (
    "the other medusa-chat was closed: conversations are saved here again, including those "
    "written here in the meantime"
)


class SessionStore:
    """All chat sessions of a server. history, steps: where the owner's are kept, None: nowhere."""

    def __init__(
        self,
        session: Session,
        ended: Callable[[Answer], None],
        history: History | None = None,
        steps: StepStore | None = None,
    ) -> None:
        self.session = session
        self.history = history
        self.steps = steps
        self._ended = ended
        self._number = itertools.count(1).__next__
        self._sessions: dict[tuple[str, str], ChatSession] = {}
        self._unsaved: set[str] = set()  # the disk did not take them: they stay in memory
        self._kept: deque[Answer] = deque()
        self._versions: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Taken inside a chat session's own lock, so never with _lock.
        self._keeping = threading.Lock()
        self._owning = threading.Lock()
        if history is not None and not history.own():
            history.fail(NOT_OWNED.format(history.other_owner))

    def find(self, scope: str, id: object) -> ChatSession | None:
        """The conversation of this id and scope, also from disk; None when there is none."""
        if not isinstance(id, str) or not ID.fullmatch(id):
            return None
        with self._lock:
            chat = self._sessions.get((scope, id))
        if chat is None and scope == OWNER and (kept := self._load(id)):
            chat = self._add(OWNER, id, kept)
        return None if chat is None or chat.is_deleted else chat

    def open(self, scope: str = OWNER, id: object = "") -> ChatSession:
        """The conversation of this id, or a new one where there is none of this scope. A scope
        that is empty becomes a guest's."""
        session = self.find(scope, id) if scope else None
        return session or self._add(scope or secrets.token_urlsafe(24), secrets.token_urlsafe(12))

    def failures(self, scope: str, told: int) -> list[str]:
        """What is wrong with the disk, but for the first ones that the owner was told."""
        if not self.history or scope != OWNER:
            return []
        return self.history.told[max(told, self.history.passed) :]

    @property
    def told(self) -> int:
        """How many failures of the disk there were."""
        return len(self.history.told) if self.history else 0

    def all(self, scope: str | None = None) -> list[ChatSession]:
        """The chat sessions in memory; those of one scope, or all."""
        with self._lock:
            sessions = list(self._sessions.values())
        return [chat for chat in sessions if scope in (None, chat.scope)]

    def touch(self, scope: str) -> None:
        """A tab of this scope is there: what runs for it goes on, whatever it shows."""
        for chat in self.all(scope):
            if chat.is_running or chat.pending:
                chat.touch(is_shown=False)

    def version(self, scope: str) -> int:
        """Grows with each change of what a list of this scope's conversations shows."""
        return self._versions[scope]

    def note_change(self, scope: str) -> None:
        """What a list of this scope's conversations shows has changed."""
        with self._keeping:
            self._versions[scope] += 1

    def recall(self, chat: ChatSession, answer: Answer) -> bool:
        """Whether the steps of an answer are there: from disk where they were let go of."""
        message = chat.transcript.message_of(answer)
        if not answer.steps and chat.is_kept and self.steps and message and not chat.is_running:
            said = chat.transcript.tree.said[message]
            answer.recall(self.steps.load(chat.id, said.copied or message))
            self._hold(answer)
        return bool(answer.steps)

    def branch(self, chat: ChatSession, length: int) -> ChatSession:
        """A new conversation from the first `length` shown messages, with the steps of its answers
        as far as they are still stored."""
        made = self.open(chat.scope)
        made.set_temporary(chat.is_temporary)
        made.restore(chat.stored.branch(length))
        made.save()
        for message, answer in made.transcript.recorded.items():
            known = chat.transcript.recorded.get(message)
            if known is None or not self.recall(chat, known):
                continue
            answer.recall(known.events)
            self._hold(answer)
            if self.steps and made.is_stored:
                at = made.transcript.tree.said[message].copied or message
                saved = (made.id, at, known.events)
                threading.Thread(target=self.steps.save, args=saved).start()
        return made

    def end_guests(self) -> None:
        """Forget what guests said: their link has ended."""
        for chat in self.all():
            if chat.scope != OWNER:
                self._drop(chat)

    def forget(self, scope: str, id: str) -> None:
        """Let go of a conversation that is gone for good: deleted, or temporary."""
        with self._lock:
            chat = self._sessions.get((scope, id))
        if chat is not None and (chat.is_deleted or chat.is_temporary):
            chat.end()
            chat.is_kept = False  # an answer that ends late is not written
            self._unsaved.discard(id)
            self._drop(chat)

    # ---- who owns what is on disk ----

    def own(self) -> bool:
        """Whether this program may change the owner's conversations; it takes them over where the
        program that had them has ended: what that one said is read, what was said here is saved."""
        history = self.history
        if history is None:
            return True
        with self._owning:
            if history.is_owned:
                return True
            if not history.own():
                return False
            for chat in self.all(OWNER):
                if chat.is_stored:
                    self._reload(chat)
                else:
                    chat.save()
            self.note_change(OWNER)
            history.recover()
            history.fail(OWNED)
            return True

    def require_own(self) -> None:
        """Raises UsageError where another program has the conversations open."""
        if not self.own():
            raise UsageError(READ_ONLY.format(self._other_owner))

    def require_writable(self, chat: ChatSession) -> None:
        """Raises UsageError for a conversation that another program has open, or had open and
        changed since it was shown here."""
        if chat.scope != OWNER:
            return
        shown = chat.transcript_version
        if chat.is_stored:
            self.require_own()
        else:
            self.own()
        if chat.transcript_version != shown or chat.is_deleted:
            raise UsageError(CHANGED)

    def refresh(self, chat: ChatSession) -> None:
        """Show a conversation of another program as that one wrote it last."""
        if chat.is_stored and self.history and not self.history.is_owned:
            self._reload(chat)

    def _reload(self, chat: ChatSession) -> None:
        """Take a conversation from the disk anew; it is gone where another program deleted it."""
        kept = self._load(chat.id)
        if kept is not None:
            chat.reread(kept)
        else:
            chat.is_deleted = True
            self._drop(chat)

    def _load(self, id: str) -> StoredConversation | None:
        """A conversation on disk; what waits in it belongs to the program that owns it."""
        kept = self.history.load(id) if self.history else None
        is_ours = self.history is not None and self.history.is_owned
        return kept if kept is None or is_ours else replace(kept, waiting="")

    @property
    def _other_owner(self) -> str:
        return self.history.other_owner if self.history else ""

    # ---- what is kept ----

    def _add(self, scope: str, id: str, kept: StoredConversation | None = None) -> ChatSession:
        for chat in list(self._superfluous(scope)):
            self._drop(chat)
        self._forget_versions(scope)
        made = ChatSession(id, scope, self.session, self._keep, self._save, self._number)
        made.is_kept = scope == OWNER
        made.most = None if scope == OWNER else MAX_GUEST_CHARACTERS
        if kept is not None:
            made.restore(kept)
            made.is_stored = True
        with self._lock:
            return self._sessions.setdefault((scope, id), made)

    def _forget_versions(self, scope: str) -> None:
        """Forget those of guests who have no conversation any more; scope: who gets one now."""
        there = {OWNER, scope, *(chat.scope for chat in self.all())}
        with self._keeping:
            for gone in self._versions.keys() - there:
                del self._versions[gone]

    def _drop(self, chat: ChatSession) -> None:
        """Let go of one. Nothing on disk changes."""
        with self._lock:
            self._sessions.pop((chat.scope, chat.id), None)
        if chat.scope != OWNER:
            chat.end()

    def _superfluous(self, scope: str) -> Iterator[ChatSession]:
        """Those to drop before one more of this scope: idle ones, then the longest left, a guest's
        empty ones and own ones first. One of the owner that runs, or is not on disk, stays."""
        chats = sorted(self.all(), key=lambda chat: chat.audience.seen_at)
        kept = (c for c in chats if c.scope == OWNER and c.id not in self._unsaved)
        owners = [c for c in kept if not c.is_running]
        guests = [c for c in chats if c.scope != OWNER]
        guests.sort(key=lambda c: (not c.is_deleted, not c.is_empty, c.scope != scope))
        mine = [c for c in guests if c.scope == scope]
        yield from (c for c in (*owners, *guests) if c.audience.is_long_gone and not c.is_running)
        if scope == OWNER:
            yield from owners[: max(0, len(owners) + 1 - MAX_SESSIONS)]
        elif len(mine) >= MAX_OF_ONE_GUEST:
            yield mine[0]
        else:
            yield from guests[: max(0, len(guests) + 1 - MAX_GUEST_SESSIONS)]

    def _save(self, chat: ChatSession, so_far: Transcript | None = None) -> None:
        """Save a changed conversation; an empty one is removed from disk. so_far: with an answer
        that is not said yet, its last message."""
        is_saved = True
        is_ours = self.history is not None and self.history.is_owned and chat.is_kept
        if self.history and is_ours and (not chat.is_empty or chat.is_stored):
            kept = chat.stored_as(so_far or chat.transcript)
            is_saved = self.history.save(chat.id, kept, chat.is_deleted)
            chat.is_stored |= is_saved
        with self._keeping:
            self._versions[chat.scope] += so_far is None
            is_new = not is_saved and chat.id not in self._unsaved
            (self._unsaved.discard if is_saved else self._unsaved.add)(chat.id)
        if is_new:
            threading.Thread(target=self._save_again, args=(chat,), daemon=True).start()

    def _save_again(self, chat: ChatSession) -> None:
        """Try until the disk takes a conversation, also where nobody says more in it."""
        while chat.id in self._unsaved:
            time.sleep(AGAIN_SECONDS)
            chat.save()

    def _keep(self, chat: ChatSession, answer: Answer) -> None:
        """Keep an answer that is over: its steps in memory and, of the owner, on disk."""
        self._ended(answer)
        message = chat.transcript.message_of(answer)
        if self.steps and answer.is_kept and chat.is_stored and answer.steps and message:
            saved = (chat.id, message, answer.events)
            threading.Thread(target=self.steps.save, args=saved).start()
        self._hold(answer)

    def _hold(self, answer: Answer) -> None:
        """Hold the steps of an answer, and let go of the oldest when there are too many."""
        with self._keeping:
            self._kept.append(answer)
            total = sum(len(kept.steps) for kept in self._kept)
            while total > MAX_STEPS_KEPT and len(self._kept) > 1:
                oldest = self._kept.popleft()
                total -= len(oldest.steps)
                oldest.forget()
