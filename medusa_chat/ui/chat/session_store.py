"""SessionStore: one per browser, found by a token that only that browser keeps. No gradio."""

import secrets
import threading
from collections import deque
from collections.abc import Callable

from medusa_chat.runtime.history import History, StoredConversation
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.transcript import Transcript

MAX_ROOMS = 200
MAX_TOKEN = 100  # characters
MAX_STEPS_KEPT = 8000  # of finished answers, all rooms: a step of 64 nodes takes about 16 KB


class SessionStore:
    """All rooms of a server, by token. history: where they are kept, None for nowhere."""

    def __init__(
        self, session: Session, ended: Callable[[Answer], None], history: History | None = None
    ) -> None:
        self.session = session
        self.history = history
        self.learn: Callable[[Answer], None] = lambda answer: (
            None
        )  # from what the owner's chats say
        self._ended = ended
        self._rooms: dict[str, ChatSession] = {}
        self._kept: deque[Answer] = deque()
        self._lock = threading.Lock()
        self._keeping = threading.Lock()  # taken inside a room's own lock, so never with _lock

    def find(self, token: object) -> ChatSession | None:
        """The room of a token that a browser keeps, from disk where it was left there; None when
        it is none of ours."""
        if not isinstance(token, str) or not 0 < len(token) <= MAX_TOKEN:
            return None
        with self._lock:
            room = self._rooms.get(token)
        kept = self.history.load(token) if room is None and self.history else None
        if kept is None:
            return room
        room = self.open(token)
        with self._lock:
            if not room.talk.messages and not room.is_running:
                room.talk, room.system = Transcript(kept.messages, kept.notes), kept.system
        return room

    def open(self, token: str = "") -> ChatSession:
        """The room of a token that this server made, or a new one."""
        with self._lock:
            if token not in self._rooms:
                self._expire()
                token = token or secrets.token_urlsafe(24)
                self._rooms[token] = ChatSession(token, self.session, self._keep, self._save)
            return self._rooms[token]

    def _save(self, room: ChatSession) -> None:
        if self.history and room.is_kept:
            kept = StoredConversation(room.talk.messages, room.talk.notes, room.system)
            self.history.save(room.token, kept)

    def _expire(self) -> None:
        """Make place: rooms that are idle, then the one that has been left the longest."""
        for token in [token for token, room in self._rooms.items() if room.is_idle]:
            del self._rooms[token]
        while len(self._rooms) >= MAX_ROOMS:
            oldest = min(self._rooms.values(), key=lambda room: room.seen_at)
            oldest.clear()
            del self._rooms[oldest.token]

    def _keep(self, answer: Answer) -> None:
        """Keep the steps of an answer, and let go of the oldest when there are too many."""
        self._ended(answer)
        if answer.is_kept:
            self.learn(answer)
        with self._keeping:
            self._kept.append(answer)
            total = sum(len(kept.steps) for kept in self._kept)
            while total > MAX_STEPS_KEPT and len(self._kept) > 1:
                oldest = self._kept.popleft()
                total -= len(oldest.steps)
                oldest.forget()
