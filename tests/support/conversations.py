"""A chat controller and its session with a scripted model."""

import time

import pytest

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.page.inputs import checked
from support.scripted import ScriptedRunner

TREES = ("chain", "full")


def turn(text="hi", **posted):
    return checked({"text": text, **posted}, TREES)


def wait_for(what, seconds=20):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def ended(room: ChatSession) -> None:
    wait_for(lambda: not room.is_running)


@pytest.fixture
def desk():
    session = Session(ScriptedRunner(delay=0.005, prefill=0.01, steps=30))
    list(session.run(LoadRequest()))
    yield ChatController(session, TREES)
    session.close()


@pytest.fixture
def room(desk):
    return desk.rooms.open()
