"""Turns: a conversation as a chat template takes it that refuses some roles, or their order."""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TypeVar

from medusa_chat.errors import ConversationRefused
from medusa_chat.messages import Message

SYSTEM = "system messages: they are read as the beginning of your next message"
ROLES = "two messages of one role in a row: they are read as one"
R = TypeVar("R")


class Turns(NamedTuple):
    """messages: as they are rendered. refused: what the template does not take, and what is done
    about it, in words; empty where the conversation is as it was."""

    messages: list[Message]
    refused: str = ""


def rendered(messages: Sequence[Message], render: Callable[[list[Message]], R]) -> tuple[R, str]:
    """What `render` makes of a conversation, and what of it the template refused, in words. Where
    it refuses the messages as they are, those of one role in a row become one, then a system
    message after the first goes into the next message of the user, then the first does too.
    Raises the first ConversationRefused where the template takes none of these."""
    first: ConversationRefused | None = None
    for turns in _ways(list(messages)):
        try:
            return render(turns.messages), turns.refused
        except ConversationRefused as refusal:
            first = first or refusal
    assert first is not None
    raise first


def _ways(messages: list[Message]) -> list[Turns]:
    """The conversation as it is, and changed as little as may help; each way once."""
    ways = [Turns(messages)]
    for kept in (len(messages), 1, 0):  # how many of the messages may be system messages
        unsystematic = _without_system(messages, kept)
        joined = _joined(unsystematic)
        names = [SYSTEM] * (unsystematic != messages) + [ROLES] * (joined != unsystematic)
        if joined not in [way.messages for way in ways]:
            ways.append(Turns(joined, "; it takes no ".join(names)))
    return ways


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Messages of one role that follow each other are one."""
    groups = ((role, list(turn)) for role, turn in groupby(messages, itemgetter("role")))
    return [{**turn[0], "content": _text(turn)} for _, turn in groups]


def _without_system(messages: Sequence[Message], kept: int) -> list[Message]:
    """System messages after the first `kept` messages go before the next message of the user;
    those that none follows after the last one."""
    done: list[Message] = []
    waiting: list[Message] = []
    for place, message in enumerate(messages):
        if message["role"] == "system" and place >= kept:
            waiting.append(message)
        elif message["role"] == "user" and waiting:
            done.append({**message, "content": _text([*waiting, message])})
            waiting = []
        else:
            done.append(message)
    asked = [at for at, message in enumerate(done) if message["role"] == "user"]
    if waiting and asked:
        last = done[asked[-1]]
        done[asked[-1]] = {**last, "content": _text([last, *waiting])}
    elif waiting:
        done.append({"role": "user", "content": _text(waiting)})
    return done


def _text(messages: Sequence[Message]) -> str:
    return "\n\n".join(message["content"] for message in messages)
