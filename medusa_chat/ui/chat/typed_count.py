"""How many tokens the message in the box takes, and how many are left: asked while one types."""

from collections.abc import Sequence

from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import CountRequest, Message
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat.node_card import soon
from medusa_chat.ui.page.tree_view import to_line

LONGEST = 250_000  # characters of a conversation: more are not counted while one types
SECONDS = 2.0  # then the browser asks again, after the answer that runs


async def count_line(
    session: Session, messages: Sequence[Message], number: int, guest: str = ""
) -> str:
    """JSON for count.js: {"message", "left"} in tokens; {"wait"} while the model is busy or
    another question waits for it; neither where nothing can be counted. number: of the question,
    which it is told with. guest: who asks, empty for the owner."""
    asked = {"asked": number}
    if sum(len(message["content"]) for message in messages) > LONGEST:
        return to_line(asked)
    if session.has_waiting(CountRequest, guest):  # one is enough, of however many tabs
        return to_line(asked | {"wait": True})
    try:
        ticket = await soon(session, CountRequest(tuple(messages)), SECONDS, guest)
    except MedusaChatError:  # no room in the queue, or the program ends
        return to_line(asked)
    if ticket.error:
        return to_line(asked)
    if (count := ticket.result) is None:
        return to_line(asked | {"wait": True})
    return to_line(asked | {"message": count.message, "left": count.left})
