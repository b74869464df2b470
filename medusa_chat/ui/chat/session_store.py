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

MAX_SESSIONS = 200
MAX_TOKEN = 100  # characters
MAX_STEPS_KEPT = 8000  # of finished answers, all sessions: a step of 64 nodes takes about 16 KB


class SessionStore:
    """All sessions of a server, by token. history: where they are kept, None for nowhere."""

    def __init__(
        self, session: Session, ended: Callable[[Answer], None], history: History | None = None
    ) -> None:
        self.session = session
        self.history = history
        self.learn: Callable[[Answer], None] = lambda answer: (
            None
        )  # from what the owner's chats say
        self._ended = ended
        self._sessions: dict[str, ChatSession] = {}
        self._kept: deque[Answer] = deque()
        self._lock = threading.Lock()
        self._keeping = (
            threading.Lock()
        )  # taken inside a chat session's own lock, so never with _lock

    def find(self, token: object) -> ChatSession | None:
        """The chat of a token that a browser keeps, from disk where it was left there; None when
        it is none of ours."""
        if not isinstance(token, str) or not 0 < len(token) <= MAX_TOKEN:
            return None
        with self._lock:
            chat = self._sessions.get(token)
        kept = self.history.load(token) if chat is None and self.history else None
        if kept is None:
            return chat
        chat = self.open(token)
        with self._lock:
            if not chat.transcript.messages and not chat.is_running:
                chat.transcript, chat.system = Transcript(kept.messages, kept.notes), kept.system
        return chat

    def open(self, token: str = "") -> ChatSession:
        """The chat of a token that this server made, or a new one."""
        with self._lock:
            if token not in self._sessions:
                self._expire()
                token = token or secrets.token_urlsafe(24)
                self._sessions[token] = ChatSession(token, self.session, self._keep, self._save)
            return self._sessions[token]

    def _save(self, chat: ChatSession) -> None:
        if self.history and chat.is_kept:
            kept = StoredConversation(chat.transcript.messages, chat.transcript.notes, chat.system)
            self.history.save(chat.token, kept)

    def _expire(self) -> None:
        """Drop chat sessions: those that are idle, then the one that has been left the longest."""
        for token in [token for token, chat in self._sessions.items() if chat.is_idle]:
            del self._sessions[token]
        while len(self._sessions) >= MAX_SESSIONS:
            oldest = min(self._sessions.values(), key=lambda chat: chat.seen_at)
            oldest.clear()
            del self._sessions[oldest.token]

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
