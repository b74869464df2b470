"""The answers that other programs ask for over the API, watched in the page's microscope."""

import json

import pytest
from starlette.testclient import TestClient
from support.conversations import ended, event, guest, owner, turn

from medusa_chat.hosts import Hosts
from medusa_chat.server.app import Api
from medusa_chat.ui.chat.browser_tab import Tab

HI = {"model": "x", "messages": [{"role": "user", "content": "from elsewhere"}]}


@pytest.fixture
def api(controller):
    return TestClient(Api(controller.session, Hosts(("testserver",))))


def test_an_answer_of_the_api_is_watched_step_by_step_and_nothing_keeps_it(controller, api):
    tab = owner()
    controller.attach(tab, None)
    assert not json.loads(controller.refresh(tab).next)["watched"]
    assert isinstance(controller.watch(tab, event(begins=True)), dict), (
        "there is none yet: nothing is drawn"
    )
    with api.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
        assert reply.status_code == 200
        reply.read()
    assert json.loads(controller.tick(tab))["watched"]
    shown = json.loads(controller.watch(tab, event(begins=True)))
    assert shown["ended"] and not shown["newest"] and shown["step"]["text"]
    assert shown["figures"]["steps"] == len(controller.session.watched.trace) - 2
    assert json.loads(controller.pick(tab, event(step=3)))["step"]["index"] == 3
    assert controller.session_of(tab).is_empty and controller.sessions.all() == [
        controller.session_of(tab)
    ]
    assert controller.newest(tab) == ""  # back to the own chat, which is empty


def test_a_guest_sees_no_request_of_the_api(controller, api):
    api.post("/v1/chat/completions", json=HI)
    tab = Tab()
    controller.attach(tab, None, guest())
    assert not json.loads(controller.refresh(tab).next)["watched"]
    assert isinstance(controller.watch(tab, event(begins=True)), dict) and tab.chosen_answer is None


def test_an_own_message_leads_back_from_what_is_watched(controller, api):
    api.post("/v1/chat/completions", json=HI)
    tab = owner()
    controller.attach(tab, None)
    controller.watch(tab, event(begins=True))
    controller.send(tab, turn("mine"))
    ended(controller.session_of(tab))
    controller.refresh(tab)
    assert controller.answer_of(tab) is controller.session_of(tab).answer


def test_who_looks_elsewhere_watches_no_more_and_what_is_known_is_not_sent_again(controller, api):
    tab = owner()
    controller.attach(tab, None)
    controller.send(tab, turn("mine"))
    ended(controller.session_of(tab))
    api.post("/v1/chat/completions", json=HI)
    shown = json.loads(controller.watch(tab, event(begins=True)))
    assert shown["watched"] and not shown["newest"]
    assert isinstance(controller.watch(tab, event()), dict), "it is shown already"
    assert not json.loads(controller.newest(tab))["watched"]
    assert isinstance(controller.watch(tab, event()), dict), "a look that came late"
    assert controller.answer_of(tab) is controller.session_of(tab).answer
