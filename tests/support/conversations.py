"""A chat controller and its session with a scripted model."""

import json

import pytest

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.session_store import OWNER
from medusa_chat.ui.chat.view import Tab
from medusa_chat.ui.page.inputs import checked
from support.scripted import ScriptedRunner
from support.waiting import wait_for

TREES = ("chain", "full")


def turn(text="hi", **posted):
    return checked({"text": text, **posted}, TREES)


def owner() -> Tab:
    """A tab of the owner's."""
    return Tab(scope=OWNER)


def known(tab: Tab) -> str:
    """What a browser keeps of a tab, as it posts it when another one opens."""
    return json.dumps({"tab": "", "last": tab.conversation, "guest": tab.scope})


def ended(chat: ChatSession) -> None:
    wait_for(lambda: not chat.is_running)


@pytest.fixture
def controller():
    session = Session(ScriptedRunner(delay=0.005, prefill=0.01, steps=30))
    list(session.lifecycle.run(LoadRequest()))
    yield ChatController(session, TREES)
    session.close()


@pytest.fixture
def chat(controller):
    return controller.sessions.open()
