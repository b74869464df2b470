"""Going on from another token of an answer: its text comes whole, and what follows is exact."""

import pytest
from support.checkpoints import write_checkpoint
from support.loading import loaded

from medusa_chat.decoding.events import Finished, Prefilled, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import TokenIds
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import Reply
from medusa_chat.ui.chat.answer import Answer, pieces_before
from medusa_chat.ui.chat.quick_requests import branch_request

PROMPT = "once upon a time there was"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(write_checkpoint(tmp_path_factory.mktemp("branch") / "m", heads=3))


def settings(**changed):
    return GenerationSettings(**{"max_new_tokens": 24, "seed": 5, "tree": "dense-2-3"} | changed)


def answered(model, prompt, **changed) -> Answer:
    made = Answer()
    made.add(
        e
        for e in reply(model, Reply(prompt, settings(**changed)))
        if isinstance(e, Prefilled | Step | Finished)
    )
    return made


def drafted(answer: Answer, index: int) -> int:
    """A node of step `index` that was tested and not accepted."""
    step = answer.steps[index]
    assert step.draft is not None
    return next(
        n for n, up in enumerate(step.draft.parents) if up in step.path and n not in step.path
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_follows_another_token_is_what_plain_decoding_says_there(model, temperature):
    chosen = {"temperature": temperature, "drafter": "medusa"}
    answer = answered(model, PROMPT, **chosen)
    index = next(i for i, step in enumerate(answer.steps) if step.nodes > len(step.path))
    node = drafted(answer, index)
    token = answer.steps[index].draft.tokens[node]
    asked = branch_request(answer, index, node, token)
    assert asked.ids[-1] == token
    branched = answered(model, asked, **chosen)
    plain = answered(model, TokenIds(asked.ids), **chosen | {"drafter": "none"})
    assert branched.finished.token_ids == plain.finished.token_ids
    assert len(branched.steps) >= 1


def test_the_same_token_gives_the_same_answer(model):
    answer = answered(model, PROMPT, drafter="medusa", temperature=0.8)
    first = answer.prefilled
    asked = branch_request(answer, 2, 0, answer.steps[2].draft.tokens[0])
    said = asked.begun
    again = answered(model, asked, drafter="medusa", temperature=0.8, max_new_tokens=24 - said)
    ids = answer.finished.token_ids
    assert asked.ids == (*first.prompt_token_ids, *ids[:said])
    assert again.finished.token_ids == ids[said:]
    assert again.finished.text == answer.finished.text


@pytest.mark.parametrize("node", [0, 1, 4])
def test_the_text_before_the_token_stands_once(model, node):
    answer = answered(model, PROMPT, drafter="medusa")
    asked = branch_request(answer, 3, node, 40)
    before = pieces_before(answer, 3, node)
    said = "".join(text for text, _ in before)
    branch = Answer(before=before, skips=said)
    branch.add(reply(model, Reply(asked, settings(drafter="medusa"))))
    whole = "".join(text for text, _ in branch.pieces)
    assert branch.text == whole
    assert whole.startswith(said)
    assert whole == said + branch.finished.text
    alone = answered(model, asked, drafter="medusa")
    assert whole == alone.text


def test_a_token_that_ends_the_answer_is_refused(model):
    answer = answered(model, PROMPT, drafter="medusa")
    (end, *_) = model.engine.eos
    with pytest.raises(UsageError, match="ends the answer"):
        list(reply(model, Reply(branch_request(answer, 1, 0, end), settings())))
