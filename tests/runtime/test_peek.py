"""A look into the model at one node: the record's own numbers, and the cache as it was."""

import asyncio
import json
import math
from dataclasses import replace

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.waiting import ask, wait_for
from support.warm_workers import warm_workers  # noqa: F401

from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.messages import LoadRequest, Peek, PeekRequest
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import InProcess, WorkerProcess
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat import quick_requests as ui_peek
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.quick_requests import card_line, peek_request, text_before

HELLO = [{"role": "user", "content": "Tell me a story about a fox"}]


@pytest.fixture(scope="module")
def demo():
    session = Session(InProcess())
    list(session.lifecycle.run(LoadRequest("demo", device="cpu", precision="fp32")))
    yield session
    session.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("peek") / "model")
    session = Session(InProcess())
    list(session.lifecycle.run(LoadRequest(str(folder), device="cpu", precision="fp32")))
    yield session
    session.close()


def answered(session: Session, prompt, **settings) -> Answer:
    answer = Answer()
    wanted = {"max_new_tokens": 40, "seed": 3, "nodes": 4} | settings
    answer.add(session.lifecycle.run(Reply(prompt, GenerationSettings(**wanted))))
    return answer


def peeked(session: Session, request: PeekRequest) -> Peek:
    (found,) = session.lifecycle.run(request)
    return found


def worst_difference(session: Session, answer: Answer, steps) -> tuple[float, float]:
    """Between the record and a look, over every node of some steps: backbone, head."""
    worst = [0.0, 0.0]
    for index in steps:
        draft = answer.steps[index].draft
        for node in range(1, len(draft.tokens)):
            request = peek_request(answer, index, node)
            found = peeked(session, request)
            mine = found.asked[0]
            assert mine.id == draft.tokens[node]
            worst[0] = max(worst[0], abs(mine.probability - draft.probabilities[node]))
            if draft.draft_probabilities[node] is not None:
                drafted = found.asked_head[0]
                worst[1] = max(worst[1], abs(drafted.probability - draft.draft_probabilities[node]))
                assert drafted.rank == draft.ranks[node] + 1
    return worst[0], worst[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0.6, "acceptance": "typical"},
        {"temperature": 0.0, "drafter": "prompt-lookup", "nodes": 8},
    ],
    ids=["greedy", "sampled", "typical", "lookup"],
)
def test_a_look_gives_the_records_own_probabilities(demo, settings):
    answer = answered(demo, HELLO, **settings)
    steps = [0, len(answer.steps) // 2, len(answer.steps) - 1]
    backbone, head = worst_difference(demo, answer, steps)
    assert backbone < 1e-3 and head < 1e-3


def test_a_random_model_agrees_too(tiny):
    answer = answered(tiny, "hello there", temperature=0.9)
    assert max(worst_difference(tiny, answer, range(min(4, len(answer.steps))))) < 1e-3


def test_the_top_ten_are_in_order_and_sum_below_one(demo):
    answer = answered(demo, HELLO)
    found = peeked(demo, peek_request(answer, 2, 1))
    for top in (found.backbone, found.head):
        shares = [r.probability for r in top]
        assert len(top) == 10 and [r.rank for r in top] == list(range(1, 11))
        assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1 + 1e-5
    assert found.backbone[0].text  # a text, not an id


def test_a_look_leaves_the_cache_for_the_next_turn(demo):
    engine = demo.runner.worker.loaded.engine
    answer = answered(demo, HELLO)
    before = list(engine._ids)
    states = [block[:, :, :, : len(before)].clone() for block in engine.backbone.cache._blocks]
    for index in (0, len(answer.steps) // 2):
        node = len(answer.steps[index].draft.tokens) - 1
        peeked(demo, peek_request(answer, index, node))
        assert engine._ids == before and engine.backbone.cache.length == len(before)
    for block, state in zip(engine.backbone.cache._blocks, states, strict=True):
        assert torch.equal(block[:, :, :, : len(before)], state)
    more = [*HELLO, {"role": "assistant", "content": answer.text}]
    turn = [*more, {"role": "user", "content": "and a bear"}]
    warm = answered(demo, turn)
    said = answer.prefilled.prompt_tokens + len(answer.finished.token_ids)
    assert warm.prefilled.reused_tokens >= said - 1
    engine.forget()
    assert answered(demo, turn).finished.token_ids == warm.finished.token_ids


def test_a_look_into_another_text_keeps_what_they_share(demo, monkeypatch):
    engine = demo.runner.worker.loaded.engine
    first = answered(demo, HELLO)
    second = answered(demo, [{"role": "user", "content": "What is the capital of Spain?"}])
    held = list(engine._ids)
    peeked(demo, peek_request(first, 5, 0))
    assert engine._ids == held
    with monkeypatch.context() as patched:
        patched.setattr(engine.backbone, "chunk", 4)
        peeked(demo, peek_request(first, 5, 0))
    assert engine._ids == held[: len(engine._ids)] and len(engine._ids) < len(held)
    assert engine.backbone.cache.length == len(engine._ids)
    again = answered(demo, [{"role": "user", "content": "What is the capital of Spain?"}])
    assert again.finished.token_ids == second.finished.token_ids


def test_a_failing_look_leaves_the_cache(demo, monkeypatch):
    engine = demo.runner.worker.loaded.engine
    answer = answered(demo, HELLO)
    held = list(engine._ids)
    monkeypatch.setattr(engine.backbone, "decoder", None)
    with pytest.raises(TypeError):
        peeked(demo, peek_request(answer, 1, 1))
    assert engine._ids == held and engine.backbone.cache.length == len(held)


@pytest.mark.parametrize(
    "request_",
    [
        PeekRequest(()),
        PeekRequest((10**6,)),
        PeekRequest((-1,)),
        PeekRequest((1,), head=99),
        PeekRequest((1,), head=-1),
        PeekRequest((1,) * 1025),  # one more than the context holds
    ],
)
def test_what_no_step_can_have_had_is_refused(demo, request_):
    with pytest.raises(UsageError):
        peeked(demo, request_)


def test_the_text_before_a_step_is_what_the_backbone_had(demo):
    answer = answered(demo, HELLO)
    for index, step in enumerate(answer.steps):
        before = text_before(answer, index)
        whole = (*answer.prefilled.prompt_token_ids, *answer.finished.token_ids)
        assert whole[: len(before)] == before
        assert whole[len(before)] == step.draft.tokens[0]


def test_the_childs_look_waits_behind_a_running_answer():
    session = Session(WorkerProcess())
    session.submit(LoadRequest("demo", device="cpu"))
    try:
        job = session.submit(Reply(HELLO, GenerationSettings(max_new_tokens=400, seed=1)))
        wait_for(lambda: any(isinstance(e, Step) for e in job.trace))
        answer = Answer()
        answer.add(list(job.trace))
        found = ask(session, peek_request(answer, 0, 1))
        assert job.done.is_set() and not job.error
        draft = answer.steps[0].draft
        assert math.isclose(found.asked[0].probability, draft.probabilities[1], abs_tol=1e-3)
        with pytest.raises(ModelError, match="no Medusa head"):
            ask(session, PeekRequest((1,), head=50))
        assert ask(session, PeekRequest((1, 2), head=1)).head
    finally:
        session.close()


def test_a_look_without_a_model_says_so():
    session = Session(InProcess())
    with pytest.raises(ModelError, match="no model is loaded"):
        ask(session, PeekRequest((1,)))
    session.close()


def test_the_card_is_small_plain_json(demo):
    answer = answered(demo, HELLO)
    line = asyncio.run(card_line(demo, answer, 1, 2))
    card = json.loads(line)
    assert len(line) < 4000 and "<" not in line
    assert len(card["backbone_top"]) == len(card["head_top"]) == 10
    assert (card["answer"], card["step"], card["node"]) == (answer.number, 1, 2)
    draft = answer.steps[1].draft
    assert card["backbone_own"][0][2] == pytest.approx(draft.probabilities[2], abs=1e-3)
    root = json.loads(asyncio.run(card_line(demo, answer, 1, 0)))
    assert root["head"] == 0 and root["backbone_own"][0][0] == draft.tokens[0]


@pytest.mark.parametrize(
    "step, node", [(-1, 0), (0, -1), (0, 9999), (9999, 0), ("0", 0), (True, 0)]
)
def test_a_card_of_nothing_is_one_line(demo, step, node):
    card = json.loads(asyncio.run(card_line(demo, answered(demo, HELLO), step, node)))
    assert card["error"] and "\n" not in card["error"]


def test_a_card_of_another_models_answer_says_so(demo, tiny):
    answer = answered(tiny, "hello there")
    assert "is loaded now" in json.loads(asyncio.run(card_line(demo, answer, 0, 0)))["error"]


def test_a_card_of_an_answer_on_another_backbone_says_so(demo):
    answer = answered(demo, HELLO)
    answer.prefilled = replace(answer.prefilled, backbone="/models/its-own")
    said = json.loads(asyncio.run(card_line(demo, answer, 0, 0)))["error"]
    assert said == "demo is loaded now, and this answer is from demo on its-own: load that one"


def test_a_card_that_waits_too_long_asks_the_browser_to_come_again(demo, monkeypatch):
    answer = answered(demo, HELLO)
    monkeypatch.setattr(ui_peek, "WAIT_SECONDS", 0.0)
    assert json.loads(asyncio.run(card_line(demo, answer, 0, 1))).get("wait")
