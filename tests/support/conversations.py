"""A chat controller and its session with a scripted model, and what a browser does to them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import gradio as gr
import pytest

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import GUEST, GUEST_HEADER
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.session_store import OWNER
from medusa_chat.ui.chat.settings_panel import build_settings
from medusa_chat.ui.page.inputs import checked
from support.scripted import ScriptedRunner
from support.waiting import wait_for

TREES = ("chain", "full")


@contextmanager
def quick_session() -> Iterator[Session]:
    """A session whose scripted model is loaded and answers in a few milliseconds."""
    session = Session(ScriptedRunner(delay=0.001, prefill=0.001, steps=5))
    session.submit(LoadRequest()).done.wait(240)
    yield session
    session.close()


def said(role, text):
    """A message, as a model takes it."""
    return {"role": role, "content": text}


def talk(turns):
    """A conversation of so many turns, and a question."""
    each = ("user", "assistant") * turns
    told = [said(role, f"This is message {at} of the {role}.") for at, role in enumerate(each)]
    return [*told, said("user", "Tell me a story")]


def turn(text="hi", **posted):
    return checked({"text": text, **posted}, TREES)


def owner() -> Tab:
    """A tab of the owner's."""
    return Tab(scope=OWNER)


def known(tab: Tab) -> str:
    """What a browser keeps of a tab, as it posts it when another one opens."""
    return json.dumps({"tab": "", "last": tab.conversation})


def ended(chat: ChatSession) -> None:
    wait_for(lambda: not chat.is_running)
    chat.fold()  # waits until the answer is in the conversation, and on disk


def post(act, refuse, tab, text="hi", event=None, **settings):
    """What a browser posts, through the same handler: a message, or an event's own fields."""
    with gr.Blocks():
        state, box = gr.State(), gr.Textbox()
        panel = build_settings(TREES, gr.Checkbox(), gr.Textbox(), state)
    sources = {"text": box} if event is None else {"text": "value", "row": "index"}
    posted = {state: tab, box: text} | {panel.components[n]: v for n, v in settings.items()}
    return panel.handler(act, refuse, state, **sources)(posted, event)


def roles(chat: ChatSession) -> list[str]:
    return [message["role"] for message in chat.transcript.messages]


def event(**data):
    return SimpleNamespace(_data=data)


def guest(name: str = "1"):
    """The request of a guest. name: as the gate reads it from their cookie."""
    return SimpleNamespace(headers={GUEST_HEADER: name}, username=GUEST)


async def watch(controller, tab, until=lambda: False):
    seen = []
    stream = controller.stream(tab)
    async for update in stream:
        seen.append(update)
        if until():
            await stream.aclose()
            break
    return seen


@pytest.fixture
def controller():
    session = Session(ScriptedRunner(delay=0.005, prefill=0.01, steps=30))
    list(session.lifecycle.run(LoadRequest()))
    yield ChatController(session, TREES)
    session.close()


@pytest.fixture
def chat(controller):
    return controller.sessions.open()
