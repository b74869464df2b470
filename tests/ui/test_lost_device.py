"""A GPU that is lost in an answer: its process ends, a new one loads the model, and the
conversation goes on."""

import pytest
from support.checkpoints import write_checkpoint
from support.conversations import TREES, ended, roles, turn
from support.lost_device import MARK, TOKENS, serve_until_lost
from support.waiting import wait_for
from support.warm_workers import warm_workers  # noqa: F401

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime import runner
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat.controller import ChatController


@pytest.fixture
def mark(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path / "lose it"))
    monkeypatch.setattr(runner, "serve", serve_until_lost)
    return tmp_path / "lose it"


def test_the_conversation_stands_and_a_new_worker_answers(mark, tmp_path):
    session = Session(runner.WorkerProcess())
    session.submit(LoadRequest(str(write_checkpoint(tmp_path / "model")), precision="fp32"))
    chat = ChatController(session, TREES).sessions.open()
    chat.audience.streaming = 1  # a tab shows it, however long the new worker takes to start
    try:
        said = ask(chat, "first", max_new_tokens=8)
        assert said and roles(chat) == ["user", "assistant"]
        first, lost = chat.transcript.messages[1]["content"], session.runner.pid
        mark.touch()
        ask(chat, "second", max_new_tokens=TOKENS)
        assert "the GPU reported an error (CUDA error: an illegal" in chat.transcript.notes[3]
        assert chat.answer.steps, "it was to be lost within an answer"
        assert not mark.exists() and chat.transcript.messages[1]["content"] == first
        wait_for(lambda: session.state.status == "ready" and session.runner.pid != lost)
        ask(chat, "third", max_new_tokens=TOKENS)
        assert chat.answer.finished is not None and chat.answer.finished.reason == "length"
        told = [message["content"] for message in chat.transcript.messages]
        assert told[:3] == ["first", first, "second"] and told[-2] == "third" and told[-1]
    finally:
        session.close()


def ask(chat, text, **settings):
    chat.ask(turn(text, temperature=0, **settings))
    ended(chat)
    return chat.transcript.messages
