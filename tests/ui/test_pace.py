"""The pace of an answer on the server: what is cut, what waits, and what the demo's show drafts."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.conversations import ended, turn
from support.waiting import wait_for

from medusa_chat.decoding.events import Step
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.requests import Reply
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.tab import EXAMPLES
from medusa_chat.ui.page.pace import Pace, usual_pace

PACED = {"paced": True, "nodes": 20}
OTHERS = (  # what the demo can do besides
    *("Tell me a story about a fox", "Tell me a bedtime story", "How do I make tea?"),
    *("How do I cook pasta?", "How do I make a sandwich?", "Give me tips to learn faster"),
    *("What is Medusa?", "Write a poem about the sea", "What do I need for a picnic?"),
    "What can you do?",
)


def event(**data):
    return SimpleNamespace(_data=data)


def asked(controller) -> tuple[Tab, object]:
    tab = Tab()
    controller.set_pace(tab, event(**PACED))
    controller.send(tab, turn("hi"))
    chat = controller.session_of(tab)
    wait_for(lambda: (chat.fold(), chat.answer.finished is not None)[1])
    return tab, chat


def test_an_answer_that_is_shown_slowly_runs_until_it_was_shown(controller):
    tab, chat = asked(controller)
    assert chat.is_running and len(chat.transcript.messages) == 1
    controller.end_show(tab, event(answer=chat.answer.number + 1))  # another one's
    assert chat.is_running
    controller.end_show(tab, event(answer=chat.answer.number))
    ended(chat)
    assert chat.transcript.messages[-1]["content"] == chat.answer.text
    assert len(chat.answer.steps) == 30


def test_stop_keeps_the_steps_that_were_shown_and_nothing_else(controller):
    tab, chat = asked(controller)
    whole = chat.answer
    controller.stop(tab, "7")
    ended(chat)
    kept = chat.answer
    text = whole.prefilled.text + "".join(step.text for step in whole.steps[:7])
    assert chat.transcript.messages[-1]["content"] == kept.text == text
    assert chat.transcript.answers[1] is kept and len(kept.steps) == 7
    assert chat.transcript.notes[1] == "stopped"
    assert kept.finished.stats.steps == 7 and kept.finished.text == text
    assert len(kept.finished.token_ids) == 1 + kept.tokens


def test_stop_before_the_first_step_keeps_the_first_token(controller):
    tab, chat = asked(controller)
    controller.stop(tab, "0")
    ended(chat)
    assert chat.transcript.messages[-1]["content"] == chat.answer.prefilled.text


def test_a_message_waits_for_the_shown_end(controller):
    tab, chat = asked(controller)
    controller.send(tab, turn("and then?"))
    assert [inputs.text for inputs in chat.pending] == ["and then?"]
    controller.end_show(tab, event(answer=chat.answer.number))
    wait_for(lambda: len(chat.transcript.messages) == 3)
    assert chat.transcript.messages[2]["content"] == "and then?"


def test_a_new_chat_ends_a_show_and_the_answer_is_kept_whole(controller):
    tab, chat = asked(controller)
    controller.new(tab, {})
    ended(chat)
    assert controller.session_of(tab).is_empty
    assert chat.transcript.messages[-1]["content"] == chat.answer.text
    assert len(chat.answer.steps) == 30


def test_the_stream_brings_every_step_once_with_its_tree(controller):
    tab, chat = asked(controller)

    async def shown() -> list[dict]:
        seen = []
        async for update in controller.stream(tab):
            if update.show:
                seen.append(json.loads(update.show))
                assert not update.text  # the browser says it, step by step
                if seen[-1]["ended"]:
                    controller.end_show(tab, event(answer=seen[-1]["answer"]))
        return seen

    lines = asyncio.run(shown())
    found = [step for line in lines for step in line["steps"]]
    assert [view["index"] for _, view, _ in found] == list(range(30))
    begin = "".join(lines[0]["begin"][1::2])
    assert begin + "".join(text for text, *_ in found) + lines[-1]["tail"] == chat.answer.text
    assert all(view["nodes"] == len(view["parent"]) for _, view, _ in found)


def test_a_pace_asks_for_its_nodes_unless_the_settings_have_some(controller):
    session = controller.session
    most = len(session.state.model.tree_facts.choices) + 1
    assert Pace(True, 20).of(turn(), session).settings.nodes == 20
    assert Pace(True, 200).of(turn(), session).settings.nodes == most
    assert Pace(True, 20).of(turn(nodes=3), session).settings.nodes == 3
    assert Pace(True, 20).of(turn(vanilla=True), session).settings.nodes is None
    assert Pace(True).of(turn(), session).settings.nodes is None


@pytest.mark.parametrize(
    "posted",
    [
        *(None, {}, {"paced": 1}, {"paced": True, "nodes": "9"}, {"paced": True, "nodes": 0}),
        {"paced": True, "order": "1"},
    ],
)
def test_what_is_no_pace_is_none(posted):
    assert Pace.posted(posted) is None


def test_of_two_choices_the_later_one_counts_whichever_comes_first():
    later = Pace.posted({"paced": True, "nodes": 16, "order": 20.5})
    assert Pace.posted({"paced": False, "nodes": None, "order": 20}, later) is later
    assert Pace.posted({"paced": False, "nodes": None, "order": 21}, later) == Pace()


def test_only_the_demo_starts_with_a_show(controller):
    assert usual_pace(controller.session) == Pace()
    none = SimpleNamespace(requested=None)
    state = SimpleNamespace(model=SimpleNamespace(name="demo"))
    demo = SimpleNamespace(state=state, lifecycle=none)
    assert usual_pace(demo) == Pace(True, 64)
    asked = SimpleNamespace(requested=LoadRequest("demo"))
    coming = SimpleNamespace(state=SimpleNamespace(model=None), lifecycle=asked)
    assert usual_pace(coming).of(turn(), coming).settings.nodes == 64  # sent before it is loaded
    asked.requested = LoadRequest("other")
    assert Pace(True, 20).of(turn(), coming).settings.nodes is None


@pytest.fixture(scope="module")
def demo():
    from medusa_chat.runtime.worker import Worker

    worker = Worker()
    *_, ready = worker.handle(LoadRequest("demo", device="cpu"), lambda: False)
    return worker, ready.model


def shown_steps(demo, prompt: str, seed: int) -> list[Step]:
    """What a click shows: the page's temperature, the nodes that the show asks for."""
    worker, model = demo
    none = SimpleNamespace(requested=None)
    session = SimpleNamespace(state=SimpleNamespace(model=model), lifecycle=none)
    settings = usual_pace(session).of(turn(prompt, temperature=0.7), session).settings
    settings = replace(settings, seed=seed)
    messages = [{"role": "user", "content": prompt}]
    events = worker.handle(Reply(messages, settings), lambda: False)
    return [event for event in events if isinstance(event, Step)]


def branches(step: Step) -> bool:
    parents = step.draft.parents
    return len(parents) >= 16 and any(parents.count(node) >= 2 for node in parents)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@pytest.mark.parametrize("prompt", EXAMPLES)
def test_every_example_is_long_branches_and_pays(demo, prompt):
    answers = [shown_steps(demo, prompt, seed) for seed in range(12)]
    rates = [sum(len(s.token_ids) for s in steps) / len(steps) for steps in answers]
    assert min(map(len, answers)) >= 9
    assert all(sum(map(branches, steps)) >= 0.9 * len(steps) for steps in answers)
    # dice are thrown at this temperature: one answer in twelve may fall a little below two
    assert median(rates) >= 2.5 and sorted(rates)[1] >= 2


@pytest.mark.parametrize("prompt", OTHERS)
def test_what_else_the_demo_can_do_branches_too(demo, prompt):
    steps = shown_steps(demo, prompt, 1)
    assert steps and sum(map(branches, steps)) >= 0.9 * len(steps)
