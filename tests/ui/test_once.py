"""What a tab posts over a link that loses answers is done once."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from medusa_chat.ui.access import notices, once
from medusa_chat.ui.access.guard import GUEST
from medusa_chat.ui.access.once import HEADER, Once
from medusa_chat.ui.access.share import Share

PROGRAM = 6_761_257_754_158_640_345


class Doer:
    """An app that does something slowly, tells of it, and answers with how often it did."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        self.times += 1
        notices.inform("done")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(self.times).encode()})


async def post(
    made: Once, number: int | None, tab: str = "a", program: float = PROGRAM, **more: str
) -> Any:
    """(status, body, what the browser is told) of one thing that a tab posts."""
    value = f"{float(program):.0f} {tab} {number}"
    headers = [] if number is None else [(HEADER.encode(), value.encode())]
    sent: list[dict] = []
    notices.NOTICES.set([])

    async def send(message: dict) -> None:
        sent.append(message)

    await made({"type": "http", "method": "POST", "headers": headers, **more}, None, send)
    return sent[0]["status"], sent[1]["body"].decode(), len(notices.NOTICES.get())


def answers(made: Once, *posts: dict[str, Any]) -> list[Any]:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(post(made, **one) for one in posts))

    return asyncio.run(ask())


def test_what_is_posted_again_is_answered_as_before_and_done_once():
    doer = Doer()
    made = Once(doer, PROGRAM, Share(lambda: 7))

    async def lost_and_posted_again() -> list[Any]:
        first = asyncio.create_task(post(made, 1))
        second = asyncio.create_task(post(made, 1))  # the first is under way
        return [await first, await second, await post(made, 1), await post(made, 2)]

    first, *again, second = asyncio.run(lost_and_posted_again())
    assert first == (200, "1", 1) and again == [first, first] and second == (200, "2", 1)


def test_what_arrives_after_the_next_is_not_done():
    doer = Doer()
    made = Once(doer, PROGRAM, Share(lambda: 7))
    answers(made, {"number": 2})
    assert answers(made, {"number": 1})[0][0] == 400 and doer.times == 1


def test_who_posted_is_done_also_when_nobody_waits_for_the_answer():
    doer = Doer()
    made = Once(doer, PROGRAM, Share(lambda: 7))

    async def gone() -> Any:
        first = asyncio.create_task(post(made, 1))
        await asyncio.sleep(0)
        first.cancel()
        return await post(made, 1)

    assert asyncio.run(gone())[1] == "1" and doer.times == 1


def test_tabs_do_not_know_of_each_other_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(once, "MAX_TABS", 2)
    doer = Doer()
    made = Once(doer, PROGRAM, Share(lambda: 7))
    for tab in "abc":
        answers(made, {"number": 1, "tab": tab})
    assert doer.times == 3 and {name for _, name in made._last} == {"b", "c"}


def test_what_guests_were_answered_is_forgotten_with_their_link():
    share = Share(lambda: 7)
    made = Once(Doer(), PROGRAM, share)
    answers(made, {"number": 1}, {"number": 1, GUEST: "guest 1"})
    assert len(made._last) == 2
    share.stop()
    assert [asker for asker, _ in made._last] == ["owner"]


def test_a_page_of_another_program_does_nothing_here():
    doer = Doer()
    made = Once(doer, PROGRAM, Share(lambda: 7))
    assert answers(made, {"number": 1, "program": 12.0})[0][0] == 409
    assert doer.times == 0
    assert answers(made, {"number": None})[0][:2] == (200, "1")


def test_what_did_not_arrive_whole_is_done_when_it_comes_again():
    doer = Doer()

    async def app(scope: dict, receive: Any, send: Any) -> None:
        if cut.pop():
            raise ClientDisconnect
        await doer(scope, receive, send)

    cut, made = [False, True], Once(app, PROGRAM, Share(lambda: 7))
    with pytest.raises(ClientDisconnect):
        answers(made, {"number": 1})
    assert answers(made, {"number": 1}, {"number": 1}) == [(200, "1", 1)] * 2


def test_an_answer_says_that_it_is_no_gateways():
    made, heard = Once(Doer(), PROGRAM, Share(lambda: 7)), []

    async def send(message: dict) -> None:
        heard.append(message)

    headers = [(HEADER.encode(), f"{float(PROGRAM):.0f} a 1".encode())]
    asyncio.run(made({"type": "http", "method": "POST", "headers": headers}, None, send))
    assert Headers(raw=heard[0]["headers"])[HEADER] == "done"


def test_nothing_is_kept_for_who_is_not_logged_in_or_only_reads():
    app = SimpleNamespace(auth=[("me", "secret")], cookie_id="x", tokens={})
    headers = [(HEADER.encode(), f"{float(PROGRAM):.0f} a 1".encode())]
    made = Once(Doer(), PROGRAM, Share(lambda: 7))

    async def send(message: dict) -> None:
        pass

    for scope in ({"method": "POST", "app": app}, {"method": "GET"}):
        asyncio.run(made({"type": "http", "headers": headers, **scope}, None, send))
    assert not made._last


def test_large_answers_are_kept_up_to_a_bound_and_nothing_is_done_twice(monkeypatch):
    doer = Doer()
    made = Once(doer, PROGRAM, Share(lambda: 7))
    monkeypatch.setattr(once, "MAX_KEPT", 2)  # an answer is one byte

    async def posted_again() -> list[Any]:
        for tab in "abc":
            await post(made, 1, tab)
        return [(await post(made, 1, tab))[:2] for tab in "abc"]

    assert asyncio.run(posted_again()) == [(400, once.LATE), (200, "2"), (200, "3")]
    assert doer.times == 3
