"""Audience: the tabs that show a conversation, and since when none does."""

import threading
import time

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
