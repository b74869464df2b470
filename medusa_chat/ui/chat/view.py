"""View: what a tab draws of its chat. Only what it does not show yet is sent."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gradio as gr

from medusa_chat.decoding.drafters import kinds
from medusa_chat.ui.chat.answer import Row, chatbot_row, rows
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.session_store import OWNER
from medusa_chat.ui.chat.transcript import Transcript
from medusa_chat.ui.page.pace import is_demo
from medusa_chat.ui.page.status import FOR_GUESTS, named
from medusa_chat.ui.page.tree_view import to_line

MAX_SHOWN = 200  # messages; a longer conversation is kept, but drawing it all would be slow
MOST_BARS = 400  # steps of the small timeline below an answer
MAX_TINTED = 40  # answers, the latest: the tint of an older one is not worth its bytes
UNANSWERED = "This message has no answer: Regenerate asks again, Undo takes it back into the box."


class View(NamedTuple):
    """Everything that follows from a chat, in the order of the events' outputs."""

    history: Any
    live: Any
    text: Any
    empty: Any
    send: Any
    stop: Any
    next: Any
    tint: Any
    regenerate: Any
    proceed: Any
    undo: Any
    redo: Any
    system: Any
    panel: Any
    versions: Any
    conversations: Any

    def then(self, later: "View") -> "View":
        """Both, where the browser gets them at once."""
        return View(*(a if b == gr.skip() else b for a, b in zip(self, later, strict=True)))


def view_of(
    tab: Tab,
    chat: ChatSession,
    panel: Callable[[], str],
    conversations: Callable[[], Any],
    hint: str = "",
) -> View:
    """What the tab does not show yet, and from now on does; the rest is skipped. hint: of the
    system prompt."""
    _notice_answer(tab, chat)
    transcript, is_running = chat.transcript, chat.is_running
    is_new = tab.version != chat.version
    is_transcript_new = tab.transcript_version != chat.transcript_version
    tab.version, tab.transcript_version = chat.version, chat.transcript_version
    is_still = (is_transcript_new or tab.has_live) and not tab.is_streaming
    # Not by every new transcript: the view of a send may come behind its stream's first words.
    is_to_clear, tab.has_live = is_still and tab.has_live, tab.has_live and not is_still
    has_messages = bool(transcript.messages)
    can = gr.update(interactive=has_messages and not is_running) if is_new else gr.skip()
    tab.views += 1
    ask = "follow" if is_running and not tab.is_streaming else ""
    shown_rows = rows_of(transcript) if is_transcript_new else []
    return View(
        history=_history(transcript, shown_rows) if is_transcript_new else gr.skip(),
        live=_ending(tab, chat) if is_still else gr.skip(),
        text="" if is_to_clear else gr.skip(),
        empty=gr.update(visible=not has_messages and not is_running) if is_new else gr.skip(),
        send=gr.update(value="Send next" if is_running else "Send") if is_new else gr.skip(),
        stop=gr.update(visible=is_running) if is_new else gr.skip(),
        next=next_line(tab, chat, ask, tab.views),
        tint=_tint(tab, transcript, shown_rows) if is_transcript_new else gr.skip(),
        regenerate=can,
        proceed=can,
        undo=can,
        redo=gr.update(visible=bool(chat.undone)) if is_new else gr.skip(),
        system=_system(tab, chat, hint),
        panel=panel() if is_new and not chat.is_paced else gr.skip(),  # the show draws its own
        versions=_versions(transcript, shown_rows) if is_transcript_new else gr.skip(),
        conversations=conversations(),
    )


def rows_of(transcript: Transcript) -> list[Row]:
    """What is drawn of a conversation: its end, when it is long."""
    first = max(0, len(transcript.messages) - MAX_SHOWN)
    return list(rows(transcript.messages, transcript.notes, transcript.answers, first))


def next_line(tab: Tab, chat: ChatSession, ask: str, view: int) -> str:
    """What waits, what the tab's script shall ask for, once per number, which conversation it shows
    and in which view, and what becomes of its box. The server never writes the box itself: what
    was typed since it was asked would be lost."""
    tab.asks += bool(ask)
    tab.has_watched = has_watched(chat)
    line = {"pending": [inputs.shown for inputs in chat.pending], "ask": ask}
    line |= {"heard": tab.heard, "taken": tab.taken, "given": tab.given, "back": tab.back}
    model = chat.session.state.model
    line |= {"number": tab.asks, "key": tab.key, "is_demo": is_demo(chat.session), "view": view}
    line["model"] = named(model.name, model.backbone) if model else ""
    line["drafter"] = kinds.short_label(model.heads, model.beside) if model else ""
    line["watched"] = tab.has_watched
    line |= {"conversation": chat.id, "temporary": chat.is_temporary}
    return to_line({**line, "guest": chat.scope != OWNER})


def has_watched(chat: ChatSession) -> bool:
    """Whether there is an answer that another program asked for, which the owner may watch."""
    return chat.scope == OWNER and chat.session.watched is not None


def error_line(line: str) -> str:
    """A line where the answer would be, with the page's words for an option of the terminal."""
    return to_line({"error": line.replace("--max-context", "Models → Context")}) + "\n"


def _notice_answer(tab: Tab, chat: ChatSession) -> None:
    """Notice a new answer: its end is to be told, and it is the one to show."""
    number = chat.answer.number
    if number != tab.number or chat.is_running:
        tab.awaits = number if tab.version or chat.is_running else 0
    if number != tab.number:
        tab.number, tab.chosen_answer, tab.watched = number, None, None


def _ending(tab: Tab, chat: ChatSession) -> str:
    """What is left to tell when nothing is being written: an error, news, or that it is done."""
    if chat.error:  # of a load that failed it names the owner's folders
        is_for_guest = chat.scope != OWNER and chat.session.state.model is None
        return error_line(FOR_GUESTS if is_for_guest else chat.error)
    if tab.refused[0] == chat.transcript_version:
        return error_line(tab.refused[1])
    if chat.news:
        return to_line({"news": chat.news}) + "\n"
    messages = chat.transcript.messages
    if messages and messages[-1]["role"] == "user" and not chat.is_running:
        return error_line(UNANSWERED)  # the program was ended before it came
    last = chat.transcript.answers.get(len(messages) - 1)
    if last is None or last.number != tab.awaits:
        return ""
    tab.awaits = 0
    return to_line({"done": last.text}) + "\n"


def _system(tab: Tab, chat: ChatSession, hint: str) -> Any:
    """The field of the system prompt: its text, and what it does."""
    before, tab.system = tab.system, (chat.system, hint)
    if before == tab.system:
        return gr.skip()
    is_new = before is None or before[0] != chat.system
    return gr.update(info=hint, **({"value": chat.system} if is_new else {}))


def _versions(transcript: Transcript, shown_rows: Sequence[Row]) -> str:
    """{"rows": [[row, version, of how many] ...], "strips": [[row, model, speed, ratio, tokens of
    each step, whether its steps are known] ...]}: the messages that have more than one, and what
    was measured of the answers, at the last row of each."""
    last = {row.position: place for place, row in enumerate(shown_rows) if row.kind != "note"}
    versions = [[place, *transcript.version(position)] for position, place in last.items()]
    strips = []
    for position, place in last.items():
        said = transcript.tree.path[position]
        if (made := said.figures) is not None:
            steps = said.lengths[2::2][:MOST_BARS]  # the first piece came with the prompt
            is_known = position in transcript.answers
            strips.append([place, made.model, made.speed, made.ratio, steps, is_known])
    return to_line({"rows": [row for row in versions if row[2] > 1], "strips": strips})


def _history(transcript: Transcript, shown_rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [chatbot_row(row, transcript.messages[row.position]["role"]) for row in shown_rows]


def _tint(tab: Tab, transcript: Transcript, shown_rows: Sequence[Row]) -> str:
    """{"rows": [[row, key] ...], "new": {key: pieces}, "typed": [[row, text] ...]}: pieces that the
    tab has are not sent again. typed: what the user wrote, to be shown as it is."""
    tinted = [(place, row) for place, row in enumerate(shown_rows) if row.pieces][-MAX_TINTED:]
    runs, new = [], {}
    for place, row in tinted:
        key = str(transcript.answers[row.position].number)
        runs.append([place, key])
        if key not in tab.tinted:
            new[key] = [part for text, tokens in row.pieces for part in (tokens, text)]
    tab.tinted |= set(new)
    typed = [
        [place, row.text]
        for place, row in enumerate(shown_rows)
        if transcript.messages[row.position]["role"] == "user"
    ]
    return to_line({"rows": runs, "new": new, "typed": typed})
