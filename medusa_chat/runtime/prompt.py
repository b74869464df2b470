"""Prompt: a text or a conversation as token ids, whose earlier turns keep theirs."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.checkpoints.control_tokens import Typed
from medusa_chat.checkpoints.loaded_model import CachedText, LoadedModel
from medusa_chat.decoding.detokenizer import STRAY
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.reasoning import HARMONY, Part, State, read
from medusa_chat.errors import ContextError, ConversationRefused, UsageError
from medusa_chat.messages import Message, Text, TokenIds

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


PART = 250_000  # characters: shorter texts are not looked at, of longer ones so many at a time
MANY = 100_000  # tokens that are counted whatever the context holds
REMEDY = "shorten it, start a new chat, or raise --max-context where the model allows it"


def refuse_endless(tokenizer: Any, text: str, context: int) -> None:
    """Raises ContextError for a text that cannot fit: of more characters than the longest tokens
    stand for, as many as the context holds, or of far more tokens than that, counted part by part:
    cuts between parts make a few more of them, so twice the context is not too much."""
    if len(text) <= PART:
        return
    most = context * max(map(len, tokenizer.get_vocab()))
    if len(text) > most:
        raise ContextError(
            f"the prompt has {len(text):,} characters and the context holds {context:,} tokens, "
            f"at most {most:,} characters: {REMEDY}"
        )
    limit = max(2 * context, MANY)
    count = 0
    for start in range(0, len(text), PART):
        part = text[start : start + PART]
        count += len(tokenizer(part, add_special_tokens=False)["input_ids"])
        if count > limit:
            raise ContextError(
                f"the prompt has more than {limit:,} tokens and the context holds {context:,}: "
                f"{REMEDY}"
            )


REASONING = ("reasoning", "reasoning_content", "thinking")  # its keys in messages, by templates


class PromptIds(NamedTuple):
    """A prompt's ids and the text they stand for. left_out: how many messages of its beginning the
    context has no room for. refused: what the chat template does not take, in words. state: where
    the answer begins, amid reasoning or not. typed: where messages hold the text of control tokens.
    """

    ids: list[int]
    text: str
    left_out: int = 0
    refused: str = ""
    state: State = "begin"
    typed: Sequence[Typed] = ()


class _Rendering(NamedTuple):
    """A conversation as text. typed: see PromptIds."""

    text: str
    typed: list[Typed]
    state: State


def encode(
    loaded: LoadedModel,
    prompt: Text | TokenIds,
    continues: bool = True,
    options: Mapping[str, Any] = {},  # noqa: B006  never written
) -> PromptIds:
    """The ids of a prompt. continues, options: as in Reply.

    A conversation is rendered by the tokenizer's chat template; where its last message is the
    assistant's, the text ends inside it and the answer continues it, its reasoning too where that
    never ended. What messages say is text (ControlTokens). The text up to the end of the last
    answer keeps its ids: only what follows is tokenised, so that the cache is reused. Raises
    ContextError for what is far too long to be tokenised.
    """
    tokenizer, context = loaded.tokenizer, loaded.info.context
    if isinstance(prompt, TokenIds):
        return PromptIds(_known(loaded, prompt.ids), "")
    if isinstance(prompt, str):
        refuse_endless(tokenizer, prompt, context)
        return PromptIds(_raw(tokenizer, prompt), prompt)
    if not tokenizer.chat_template:
        raise UsageError(
            f"{loaded.info.name} has no chat template: give texts, with `generate --raw --prompt` "
            "or --prompts"
        )
    refuse_endless(tokenizer, "".join(_part(one).text for one in prompt), context)

    def render(messages: list[Message]) -> _Rendering:
        return _rendered(loaded, messages, continues, options)

    found, refused = rendered(prompt, render)
    text, typed, state = found
    refuse_endless(tokenizer, text, context)
    said = loaded.said
    if said is None or not said.begins(text, typed):
        ids = loaded.control_tokens.ids(text, typed)
    else:
        start = len(said.text)
        rest = [Typed(one.start - start, one.end - start) for one in typed if one.start >= start]
        ids = [*said.ids, *loaded.control_tokens.ids_after(text[start:], rest)]
    return PromptIds(ids, text, refused=refused, state=state, typed=typed)


def _known(loaded: LoadedModel, ids: Sequence[int]) -> list[int]:
    """The ids of a prompt that came as ids. Raises UsageError for what is no token."""
    size = loaded.engine.backbone.vocabulary
    for token in ids:
        if not 0 <= token < size:
            raise UsageError(f"the prompt has the token id {token}: give ids from 0 to {size - 1}")
    return list(ids)


def _raw(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text with what the tokenizer puts around it; BOS once where it is typed too."""
    ids: list[int] = tokenizer(text)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def encode_latest(loaded: LoadedModel, messages: Sequence[Message], wanted: int) -> PromptIds:
    """`encode` of a conversation without its oldest messages, where the context would not hold it
    and `wanted` new tokens, or a quarter of the context where that is less.

    The system prompt stays, and a user's message comes first. Tokens are dropped by quarters of the
    context, so that some turns to come begin alike and the cache is reused; not of a conversation
    that is too long to be counted. Raises ContextError where the last message is.
    """
    part = -(-loaded.info.context // 4)
    most = loaded.info.context - min(wanted, part)
    asked = [at for at, message in enumerate(messages) if message["role"] == "user"][1:]
    with suppress(ContextError) if asked else nullcontext():
        whole = encode(loaded, messages)
        if len(whole.ids) <= most or not asked:
            return whole
        most = len(whole.ids) - part * -(-(len(whole.ids) - most) // part)
    system = [one for one in messages[:1] if one["role"] == "system"]

    def of(start: int) -> PromptIds:
        return encode(loaded, [*system, *messages[start:]])

    def fits(start: int) -> bool:
        with suppress(ContextError):
            return len(of(start).ids) <= most
        return False

    place = bisect_left(asked[:-1], True, key=fits)
    return of(asked[place])._replace(left_out=asked[place] - len(system))


def _rendered(
    loaded: LoadedModel, messages: list[Message], continues: bool, options: Mapping[str, Any]
) -> _Rendering:
    """The conversation up to where the assistant's next token belongs. Raises UsageError."""
    hidden: list[str] = []
    parts = [_taken_apart(loaded, one, hidden) for one in messages]
    shown = [_for_template(loaded, *one) for one in zip(messages, parts, strict=True)]
    is_begun = continues and messages and messages[-1]["role"] == "assistant"
    begun = parts[-1] if is_begun else None
    if begun is None:
        text = renderer().render(loaded.tokenizer, shown, options=options)
        state = loaded.markup.after(text)
    elif begun.reasoning:  # as the model wrote it: templates may leave it out
        prompt = renderer().render(loaded.tokenizer, shown[:-1], options=options)
        text = prompt + loaded.markup.written(begun, prompt)
        state = "answer" if begun.text else "reasoning"
    else:
        text = renderer().render(loaded.tokenizer, shown, continues=True, options=options)
        trimmed = begun.text.rstrip()  # some templates strip a message; its end is its own
        if not text.endswith(begun.text) and text.endswith(trimmed):
            text += begun.text[len(trimmed) :]
        state = "answer"
    return _Rendering(*loaded.control_tokens.restore(text, hidden), state)


def _part(message: Message) -> Part:
    """The reasoning and the text of a message."""
    part = Part(message.get("reasoning", ""), message["content"])
    is_read = message["role"] == "assistant" and not part.reasoning
    return read(part.text) if is_read else part


def _taken_apart(loaded: LoadedModel, message: Message, hidden: list[str]) -> Part:
    """The same without the text of control tokens."""
    return Part(*(loaded.control_tokens.hide(text, hidden) for text in _part(message)))


def _for_template(loaded: LoadedModel, message: Message, part: Part) -> Message:
    """A message as templates take it. Reasoning has several names; a template that knows none of
    them leaves it out. Harmony's leave it out, too, and the first of them broke at it."""
    made = {"role": message["role"], "content": part.text}
    is_told = part.reasoning and loaded.markup != HARMONY
    return made | dict.fromkeys(REASONING, part.reasoning) if is_told else made


def said_so_far(loaded: LoadedModel, prompt: PromptIds, event: Finished) -> CachedText | None:
    """The conversation with the answer, for the next turn to begin with; None after an error, and
    where the answer ends amid a character. An answer that was cut, as at a stop string, is not how
    that turn begins."""
    whole = loaded.tokenizer.decode(list(event.token_ids), clean_up_tokenization_spaces=False)
    if event.reason == "error" or whole.endswith(STRAY):
        return None
    ids = [*prompt.ids, *event.token_ids]
    return CachedText(prompt.text + whole, ids, len(prompt.text), prompt.typed)
