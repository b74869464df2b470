"""View: what a tab draws of its room. Only what it does not show yet is sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gradio as gr

from medusa_chat.ui.chat.answer import Answer, Row, drawn_row, rows
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.reasoning_spans import said
from medusa_chat.ui.chat.transcript import Transcript
from medusa_chat.ui.page.tree_view import to_line

MAX_SHOWN = 200  # messages; a longer conversation is kept, but drawing it all would be slow
MAX_TINTED = 40  # answers, the latest: the tint of an older one is not worth its bytes


@dataclass
class Tab:
    """One browser tab: whose room it shows, what it has drawn, and what it looks at.

    key: a secret of this tab, by which it asks for the stream of an answer. looks_at: an earlier
    answer; None is the latest. number: of the latest it knows. awaits: of the one whose end it has
    not told. has_live: whether it shows what a stream wrote. tinted: keys of the pieces it has.
    """

    token: str = ""
    key: str = ""
    version: int = 0
    talk_version: int = 0
    system: str = ""
    asks: int = 0
    is_streaming: bool = False
    has_live: bool = False
    looks_at: Answer | None = None
    number: int = 0
    awaits: int = 0
    tinted: set[str] = field(default_factory=set)


class View(NamedTuple):
    """Everything that follows from a room, in the order of the events' outputs."""

    history: Any
    live: Any
    text: Any
    box: Any
    empty: Any
    send: Any
    stop: Any
    next: Any
    tint: Any
    regenerate: Any
    proceed: Any
    undo: Any
    system: Any
    panel: Any


def view_of(tab: Tab, room: ChatSession, panel: Callable[[], str]) -> View:
    """What the tab does not show yet, and from now on does; the rest is skipped."""
    _meet(tab, room)
    talk, is_running = room.talk, room.is_running
    is_new, is_talk_new = tab.version != room.version, tab.talk_version != room.talk_version
    tab.version, tab.talk_version = room.version, room.talk_version
    is_still = (is_talk_new or tab.has_live) and not tab.is_streaming
    tab.has_live &= not is_still
    has_talk = bool(talk.messages)
    can = gr.update(interactive=has_talk and not is_running) if is_new else gr.skip()
    drawn = rows_of(talk) if is_talk_new else []
    return View(
        history=_history(talk, drawn) if is_talk_new else gr.skip(),
        live=_rest(tab, room) if is_still else gr.skip(),
        text="" if is_still else gr.skip(),
        box=gr.skip(),
        empty=gr.update(visible=not has_talk and not is_running) if is_new else gr.skip(),
        send=gr.update(value="Queue" if is_running else "Send") if is_new else gr.skip(),
        stop=gr.update(visible=is_running) if is_new else gr.skip(),
        next=next_line(tab, room, "follow" if is_running and not tab.is_streaming else ""),
        tint=_tint(tab, talk, drawn) if is_talk_new else gr.skip(),
        regenerate=can,
        proceed=can,
        undo=can,
        system=_system(tab, room),
        panel=panel() if is_new else gr.skip(),
    )


def rows_of(talk: Transcript) -> list[Row]:
    """What is drawn of a conversation: its end, when it is long."""
    first = max(0, len(talk.messages) - MAX_SHOWN)
    return list(rows(talk.messages, talk.notes, talk.answers, first))


def next_line(tab: Tab, room: ChatSession, ask: str) -> str:
    """What waits, what the tab's script shall ask for, once per number, and whose room it is."""
    tab.asks += bool(ask)
    line = {"pending": [inputs.text[:200] for inputs in room.pending], "ask": ask}
    return to_line({**line, "number": tab.asks, "token": room.token, "key": tab.key})


def error_line(line: str) -> str:
    """A line where the answer would be."""
    return to_line({"error": line}) + "\n"


def returned(text: str, box: object) -> Any:
    """A message that comes back goes before what is being written."""
    if not text:
        return gr.skip()
    return f"{text}\n\n{box}" if isinstance(box, str) and box.strip() else text


def _meet(tab: Tab, room: ChatSession) -> None:
    """Notice a new answer: its end is to be told, and it is what is looked at."""
    number = room.answer.number
    if number != tab.number or room.is_running:
        tab.awaits = number if tab.version or room.is_running else 0
    if number != tab.number:
        tab.number, tab.looks_at = number, None


def _rest(tab: Tab, room: ChatSession) -> str:
    """What is left to tell when nothing is being written: an error, or that it is done."""
    if room.error:
        return error_line(room.error)
    last = room.talk.answers.get(len(room.talk.messages) - 1)
    if last is None or last.number != tab.awaits:
        return ""
    tab.awaits = 0
    return to_line({"done": said(last.text)}) + "\n"


def _system(tab: Tab, room: ChatSession) -> Any:
    if tab.system == room.system:
        return gr.skip()
    tab.system = room.system
    return room.system


def _history(talk: Transcript, drawn: Sequence[Row]) -> list[dict[str, Any]]:
    return [drawn_row(row, talk.messages[row.position]["role"]) for row in drawn]


def _tint(tab: Tab, talk: Transcript, drawn: Sequence[Row]) -> str:
    """{"rows": [[row, key] ...], "new": {key: pieces}}: what the tab has is not sent again."""
    tinted = [(place, row) for place, row in enumerate(drawn) if row.pieces][-MAX_TINTED:]
    found, new = [], {}
    for place, row in tinted:
        key = f"{talk.answers[row.position].number}.{row.start}"
        found.append([place, key])
        if key not in tab.tinted:
            new[key] = [part for text, tokens in row.pieces for part in (tokens, text)]
    tab.tinted |= set(new)
    return to_line({"rows": found, "new": new})
