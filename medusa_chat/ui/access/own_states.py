"""OwnStates: what Gradio keeps of browser tabs, each out of reach for others and gone with its tab.

Gradio's own holder keeps 10,000 of them, each with a copy of the whole page's configuration, and
none goes before that.
"""

import time
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.state_holder import SessionState, StateHolder
from starlette.exceptions import HTTPException

from medusa_chat.ui.access.guard import ASKER, OWNER
from medusa_chat.ui.access.notices import warn

MAX_STATES = 1000
MAX_GUEST_STATES = 200  # of all guests
MAX_OF_ONE_GUEST = 20
MAX_NAME = 100  # characters of a tab's name
MAX_ENDED = 10_000  # names of tabs that are remembered
CLOSED_SECONDS = 120.0  # that a tab is kept whose connection has ended: a link may break
IDLE_SECONDS = 3600.0  # the same without an end: a hidden tab gives a sign once a minute
ANOTHERS = "this tab is another visitor's: load the page again"
ENDED = "this tab was idle for too long: load the page again"
TOO_MANY = "Too many tabs of this page are open: close one, or come again in some minutes."
MISNAMED = f"a tab's name has at most {MAX_NAME} characters: load the page again"


class OwnState(SessionState):
    """What Gradio keeps of one tab. asker: who opened it. used_at: when it gave a sign last
    (time.monotonic)."""

    def __init__(self, blocks: gr.Blocks, asker: str | None) -> None:
        # With no blocks to describe for deep links: four fifths of a state, and 18 ms.
        super().__init__(SimpleNamespace(default_config=blocks.default_config, blocks={}))
        self.asker = asker
        self.used_at = time.monotonic()

    def __setitem__(self, key: int, value: Any) -> None:
        """Keep a value, or a component as an event has changed it. That one is made anew under an
        id of its own, by which the next event would not find it and keep one more."""
        if isinstance(value, Block):
            value._id = key
            self.blocks_config.blocks[key] = value
        else:
            super().__setitem__(key, value)

    def _update_config(self, key: int) -> None:
        """Nothing is kept for deep links."""

    def _update_value_in_config(self, key: int, value: Any) -> None:
        """Nothing is kept for deep links."""

    @property
    def idle_seconds(self) -> float:
        """How long it has given no sign."""
        return time.monotonic() - self.used_at

    @property
    def is_over(self) -> bool:
        """Whether its tab is taken to be gone."""
        return self.idle_seconds > (CLOSED_SECONDS if self.is_closed else IDLE_SECONDS)


class OwnStates(StateHolder):
    """The tabs' states, by the name that a browser made up for each; that name is all it posts, so
    each state belongs to the first asker. Every event passes here before it is run."""

    session_data: OrderedDict[str, OwnState]  # type: ignore[assignment]

    def __init__(self, blocks: gr.Blocks) -> None:
        super().__init__()
        self.set_blocks(blocks)
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __getitem__(self, session_id: str) -> SessionState:
        """The state of a tab, a new one for a new tab. Raises HTTPException where it is another
        asker's, where it has ended, so that the page loads itself again, and where a guest has too
        many."""
        asker = ASKER.get()
        state = self.session_data.get(session_id) or self._opened(session_id, asker)
        if asker is not None and state.asker not in (None, asker):
            raise HTTPException(403, ANOTHERS)
        state.asker = state.asker or asker
        state.used_at = time.monotonic()
        self.session_data[session_id] = state
        self.session_data.move_to_end(session_id)
        while len(self.session_data) > MAX_STATES:
            self._end(next(iter(self.session_data)))
        return state

    def _opened(self, name: str, asker: str | None) -> OwnState:
        if len(name) > MAX_NAME:
            raise HTTPException(400, MISNAMED)
        if name in self._ended:
            raise HTTPException(409, ENDED)
        if asker not in (None, OWNER):
            self._make_room(asker)
        return OwnState(self.blocks, asker)

    def _make_room(self, guest: str | None) -> None:
        """Have room for one more tab of a guest: those that are closed go first, then one that has
        given no sign for long. Raises HTTPException where there is none."""
        guests = [(n, s) for n, s in self.session_data.items() if s.asker not in (None, OWNER)]
        mine = [(name, state) for name, state in guests if state.asker == guest]
        full = mine if len(mine) >= MAX_OF_ONE_GUEST else guests
        if full is guests and len(guests) < MAX_GUEST_STATES:
            return
        name, oldest = max(full, key=lambda one: (one[1].is_closed, one[1].idle_seconds))
        if not (oldest.is_closed or oldest.idle_seconds > CLOSED_SECONDS):
            warn(TOO_MANY)
            raise HTTPException(429, TOO_MANY)
        self._end(name)

    def delete_all_expired_state(self) -> None:
        """Let go of the tabs that are gone; Gradio asks for it every second."""
        for name, state in list(self.session_data.items()):
            if state.is_over:
                self._end(name)

    def end_guests(self) -> None:
        """Let go of the guests' tabs: their link has ended."""
        for name, state in list(self.session_data.items()):
            if state.asker not in (None, OWNER):
                self._end(name)

    def _end(self, name: str) -> None:
        self.session_data.pop(name, None)
        self._ended[name] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
