"""The page in a real browser on the real demo model, in its worker process."""

import os
import re
import signal
import sys
from collections.abc import Iterator

import pytest
from support.page import (
    SET_PACE,
    Served,
    ask,
    drawn_path,
    keep_no_settings,
    last_answer,
    new_chat,
    open_settings,
    page_of,
)
from support.warm_workers import warm_starts

from medusa_chat.decoding.events import Finished, Prefilled, Step
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.requests import Reply, Ticket
from medusa_chat.runtime.runner import WorkerProcess
from medusa_chat.runtime.session import Session

WORDS = re.compile(r"[^\W\d_]+")  # what Markdown draws as letters; a list's marks it does not
# What the status says, word for word, however short it stays.
WATCH_STATUS = """() => {
  window.said = [];
  const at = document.querySelector('.status-line .sentence');
  new MutationObserver(() => window.said.push(at.textContent)).observe(at,
    {childList: true, characterData: true, subtree: true});
}"""


class Recording(Session):
    """A session that remembers the jobs it was given."""

    def __init__(self) -> None:
        super().__init__(WorkerProcess())
        self.jobs: list[Ticket] = []

    def submit(self, request, guest=""):
        ticket = super().submit(request, guest)
        if isinstance(request, Reply):
            self.jobs.append(ticket)
        return ticket


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with warm_starts():  # a worker that is started again starts cold, as those of users do
        session = Recording()
    session.submit(LoadRequest("demo", device="cpu"))
    with page_of(session, trees=("sparse-16", "mc_sim_7b_63")) as page:
        yield page


@pytest.fixture
def tab(served, open_tab):
    """An open tab, once the model is there, at full speed: the show has tests of its own."""
    tab = open_tab()
    tab.evaluate(SET_PACE, {"mode": "full"})
    yield tab
    tab.evaluate("localStorage.removeItem('medusa-chat-pace')")  # so that the tab is kept


def test_the_demo_answers_and_its_tree_is_the_traces(served, tab):
    ask(tab, "Tell me a story about a fox")
    trace = served.session.jobs[-1].trace
    assert isinstance(trace[0], Prefilled) and isinstance(trace[-1], Finished)
    shown, said = (WORDS.findall(text) for text in (last_answer(tab), trace[-1].text))
    assert shown == said
    last = [event for event in trace if isinstance(event, Step)][-1]
    tab.wait_for_selector(f'svg.tree[data-step="{last.index}"]')
    assert drawn_path(tab) == list(last.path)
    assert tab.locator("svg.tree .chip").count() == len(last.draft.tokens)


def test_the_second_turn_reuses_the_cache(served, tab):
    ask(tab, "What is the capital of Spain?")
    first = served.session.jobs[-1].trace
    ask(tab, "and of France?")
    second = served.session.jobs[-1].trace
    kept = first[0].prompt_tokens + len(first[-1].token_ids)
    assert second[0].reused_tokens >= kept - 1
    assert second[0].prompt_token_ids[:kept] == (
        *first[0].prompt_token_ids,
        *first[-1].token_ids,
    )


def test_vanilla_and_medusa_say_the_same_with_one_seed(served, tab):
    open_settings(tab)
    tab.get_by_label("Seed").fill("7")
    tab.check("#vanilla input")
    ask(tab, "Tell me a story about a lamp")
    plain = served.session.jobs[-1]
    assert plain.trace[0].settings["drafter"] == "none"
    new_chat(tab)
    tab.uncheck("#vanilla input")
    ask(tab, "Tell me a story about a lamp")
    medusa = served.session.jobs[-1]
    assert medusa.trace[0].settings["drafter"] == "auto"
    assert [run.trace[0].settings["seed"] for run in (plain, medusa)] == [7, 7]
    assert medusa.trace[-1].token_ids == plain.trace[-1].token_ids
    assert medusa.trace[-1].stats.steps < plain.trace[-1].stats.steps
    assert "×" in tab.locator("[data-figure='times plain'] .value").inner_text()
    tab.click("#reset")
    seed = tab.get_by_label("Seed").element_handle()
    tab.wait_for_function("field => field.value === ''", arg=seed)
    keep_no_settings(tab)


def test_a_prompt_over_the_context_is_one_line_and_stays_in_the_box(served, tab):
    tab.fill("#box textarea", "word " * 3000)
    tab.click("#send")
    tab.wait_for_function(
        "document.querySelector('.live-error')?.textContent.includes('context holds 1024')"
    )
    assert tab.input_value("#box textarea").startswith("word word")


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_a_dead_worker_is_said_and_replaced(served, tab):
    ask(tab, "hello")
    turns = tab.locator("#history .bot").count()
    tab.evaluate(WATCH_STATUS)
    os.kill(served.session.runner.pid, signal.SIGKILL)
    tab.wait_for_function("window.said.some(text => text.includes('signal 9): restarting'))")
    tab.wait_for_selector('.status-line[data-status="ready"]')
    assert tab.locator("#history .bot").count() == turns
    ask(tab, "hello again")
    assert tab.locator("#history .bot").count() == turns + 1
