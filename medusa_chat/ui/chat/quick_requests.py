"""Quick requests: what a browser asks the model beside answers, and has at once or asks again.

What the model would have said at a node of a recorded step, on a click; how many tokens the message
in the box takes, while one types.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.events import DraftRecord, Step
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.messages import CountRequest, Message, PeekRequest, Ranked, Request, TokenIds, V
from medusa_chat.runtime.requests import Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.page.inputs import whole_number
from medusa_chat.ui.page.status import named
from medusa_chat.ui.page.tree_view import printable, short, to_line

POLL_SECONDS = 0.04
WAIT_SECONDS = 20.0  # then the browser is told to ask again
MOST_COUNTED = 250_000  # characters of a conversation: more are not counted while one types
COUNT_SECONDS = 2.0  # then the browser asks again, after the answer that runs


def peek_request(answer: Answer, index: int, node: int) -> PeekRequest:
    """What asks the model for the candidates beside `node` of step `index`, at its parent; for the
    root, at the end of the text before it. Raises UsageError where nothing was recorded."""
    first, step = answer.prefilled, _step(answer, index)
    draft = step.draft
    if first is None or draft is None or not 0 <= node < len(draft.tokens):
        raise UsageError(f"node {node} of step {index + 1} was not recorded: choose another")
    path, depth, at = [], 0, draft.parents[node]
    while at >= 0:
        path.append(draft.tokens[at])
        at = draft.parents[at]
        depth += 1
    by_heads = _is_by_heads(draft, node, first.settings.get("drafter"))
    return PeekRequest(
        token_ids=text_before(answer, index),
        path=tuple(reversed(path)),
        head=depth if by_heads else 0,
        temperature=first.settings.get("temperature") or 1.0,
        tokens=(draft.tokens[node],),
    )


def branch_request(answer: Answer, index: int, node: int, token: int) -> TokenIds:
    """What has the model go on with `token` in the place of `node` of step `index`: the text before
    the step, the path to the node's parent, and the token, of which what is not the prompt begins
    the answer. Raises UsageError where nothing was recorded."""
    asked, first = peek_request(answer, index, node), answer.prefilled
    assert first is not None
    if answer.reasoning:
        raise UsageError("an answer with a thought cannot go on from another token")
    ids = (*asked.token_ids, *asked.path, token)
    return TokenIds(ids, begun=len(ids) - len(first.prompt_token_ids))


def _is_by_heads(draft: DraftRecord, node: int, drafter: object) -> bool:
    """Whether the heads proposed a node of a draft by this drafter, alone or with the text."""
    if not node or drafter not in (kinds.AUTO, kinds.MEDUSA.name):
        return False
    heads = kinds.MEDUSA.source
    return not draft.sources or draft.sources[node] in (heads, kinds.WITH_TEXT[heads])


def text_before(answer: Answer, index: int) -> tuple[int, ...]:
    """The token ids that were certain before step `index`, without the root of its tree."""
    assert answer.prefilled is not None
    first = answer.prefilled
    said = [*first.token_ids, *(t for step in answer.steps[:index] for t in step.token_ids)]
    return (*first.prompt_token_ids, *said[:-1])


async def card_line(
    session: Session, answer: Answer, index: object, node: object, guest: str = ""
) -> str:
    """JSON for the card of one node: both top 10s, or {"error"}, or {"wait"}: ask again. guest: who
    asks, empty for the owner."""
    asked: dict[str, Any] = {"answer": answer.number, "step": index, "node": node}
    try:
        at, place = whole_number(index), whole_number(node)
        if at is None or place is None:
            raise UsageError("this step has no such node: choose another")
        request = peek_request(answer, at, place)
        require_same_model(session, answer)
        ticket = await soon(session, request, WAIT_SECONDS, guest)
    except MedusaChatError as error:
        return to_line(asked | {"error": str(error)})
    if ticket.error:
        return to_line(asked | {"error": ticket.error})
    if (peek := ticket.result) is None:
        return to_line(asked | {"wait": True})
    return to_line(
        asked
        | {
            "temperature": request.temperature,
            "head": request.head,
            "backbone_top": [_row(r) for r in peek.backbone],
            "head_top": [_row(r) for r in peek.head],
            "backbone_own": [_row(r) for r in peek.asked],
            "head_own": [_row(r) for r in peek.asked_head],
        }
    )


async def soon(session: Session, request: Request[V], seconds: float, guest: str) -> Ticket[V]:
    """The ticket of a quick request once it is done, or after so many seconds as it is then: no
    request of a browser stays open for minutes."""
    ticket = session.take_up(request, guest)
    try:
        for _ in range(round(seconds / POLL_SECONDS)):
            if ticket.done.is_set():
                break
            await asyncio.sleep(POLL_SECONDS)
        return ticket
    finally:
        session.leave(ticket)


def require_same_model(session: Session, answer: Answer) -> None:
    model, first = session.state.model, answer.prefilled
    if model is None or first is None:
        return
    is_named = (model.name, model.precision) == (first.model, first.precision)
    if not is_named or first.backbone not in ("", model.backbone):
        now = named(model.name, model.backbone)
        then = named(first.model, first.backbone)
        raise UsageError(f"{now} is loaded now, and this answer is from {then}: load that one")


def _step(answer: Answer, index: int) -> Step:
    if not 0 <= index < len(answer.steps):
        raise UsageError(f"step is {index + 1}, and the answer has {len(answer.steps)} steps")
    return answer.steps[index]


def _row(ranked: Ranked) -> list[Any]:
    return [ranked.id, printable(ranked.text), short(ranked.probability), ranked.rank]


async def count_line(
    session: Session, messages: Sequence[Message], number: int, guest: str = ""
) -> str:
    """JSON for count.js: {"message", "left"} in tokens; {"wait"} while the model is busy or
    another question waits for it; neither where nothing can be counted. number: of the question,
    which it is told with. guest: who asks, empty for the owner."""
    asked = {"asked": number}
    if sum(len(message["content"]) for message in messages) > MOST_COUNTED:
        return to_line(asked)
    if session.has_waiting(CountRequest, guest):  # one is enough, of however many tabs
        return to_line(asked | {"wait": True})
    try:
        ticket = await soon(session, CountRequest(tuple(messages)), COUNT_SECONDS, guest)
    except MedusaChatError:  # no room in the queue, or the program ends
        return to_line(asked)
    if ticket.error:
        return to_line(asked)
    if (count := ticket.result) is None:
        return to_line(asked | {"wait": True})
    return to_line(asked | {"message": count.message, "left": count.left})
