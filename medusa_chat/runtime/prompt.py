"""Prompt: a text or a conversation as token ids; earlier turns keep their ids."""

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
from medusa_chat.messages import Count, Message, Text, TokenIds

SYSTEM = "system messages: they are put at the start of your next message"
ROLES = "two messages of one role in a row: they are joined"
R = TypeVar("R")


class Turns(NamedTuple):
    """messages: as they are rendered. refused: what the template does not accept, and what was done
    about it, in words; empty for an unchanged conversation."""

    messages: list[Message]
    refused: str = ""


def rendered(messages: Sequence[Message], render: Callable[[list[Message]], R]) -> tuple[R, str]:
    """Render a conversation -> (the result, what the template refused, in words). If it refuses the
    messages unchanged, messages of one role in a row are joined; then system messages after the
    first message are moved into the next user message; then the first one too. Raises the first
    ConversationRefused if the template accepts none of these."""
    first: ConversationRefused | None = None
    for turns in _ways(list(messages)):
        try:
            return render(turns.messages), turns.refused
        except ConversationRefused as refusal:
            first = first or refusal
    assert first is not None
    raise first


def _ways(messages: list[Message]) -> list[Turns]:
    """The conversation unchanged, then with the smallest changes that may help; each once."""
    ways = [Turns(messages)]
    for kept in (len(messages), 1, 0):  # system messages among the first `kept` stay
        unsystematic = _without_system(messages, kept)
        joined = _joined(unsystematic)
        names = [SYSTEM] * (unsystematic != messages) + [ROLES] * (joined != unsystematic)
        if joined not in [way.messages for way in ways]:
            ways.append(Turns(joined, "; it takes no ".join(names)))
    return ways


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of one role."""
    groups = ((role, list(turn)) for role, turn in groupby(messages, itemgetter("role")))
    return [{**turn[0], "content": _text(turn)} for _, turn in groups]


def _without_system(messages: Sequence[Message], kept: int) -> list[Message]:
    """Put system messages after the first `kept` messages at the start of the next user message;
    those that no user message follows, at the end of the last one."""
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


PART = 250_000  # characters: shorter texts are not counted, longer ones in parts of this length
MANY = 100_000  # tokens that are always counted, however small the context
REMEDY = "shorten it, start a new chat, or raise --max-context where the model allows it"


def refuse_too_long(tokenizer: Any, text: str, context: int) -> None:
    """Raises ContextError for a text that cannot fit: one with more characters than a context full
    of the longest tokens, or with more than twice as many tokens as the context, counted in parts
    (cuts between parts add a few tokens)."""
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


REASONING = ("reasoning", "reasoning_content", "thinking")  # its keys in chat templates


class PromptIds(NamedTuple):
    """A prompt's ids and their text. left_out: how many of the oldest messages were left out for
    lack of space in the context. refused: what the chat template does not accept, in words. state:
    the reasoning state in which the answer begins. typed: the spans of the text in which messages
    contain the text of control tokens."""

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

    A conversation is rendered by the tokenizer's chat template. If its last message is the
    assistant's, the text ends inside it and the answer continues it, including reasoning that has
    not ended. Messages never produce control tokens (see ControlTokens). The text up to the end of
    the last answer keeps its ids and only the rest is tokenised, so that the cache is reused.
    Raises ContextError for text that is far too long to tokenise.
    """
    tokenizer, context = loaded.tokenizer, loaded.info.context
    if isinstance(prompt, TokenIds):
        return PromptIds(_checked_ids(loaded, prompt.ids), "")
    if isinstance(prompt, str):
        refuse_too_long(tokenizer, prompt, context)
        return PromptIds(_raw(tokenizer, prompt), prompt)
    if not tokenizer.chat_template:
        raise UsageError(
            f"{loaded.info.name} has no chat template: give texts, with `generate --raw --prompt` "
            "or --prompts"
        )
    refuse_too_long(tokenizer, "".join(_part(one).text for one in prompt), context)

    def render(messages: list[Message]) -> _Rendering:
        return _rendered(loaded, messages, continues, options)

    rendering, refused = rendered(prompt, render)
    text, typed, state = rendering
    refuse_too_long(tokenizer, text, context)
    begun = [one for one in loaded.said if one.begins(text, typed)]
    said = max(begun, key=lambda one: len(one.text), default=None)
    if said is None:
        ids = loaded.control_tokens.ids(text, typed)
    else:
        start = len(said.text)
        rest = [Typed(one.start - start, one.end - start) for one in typed if one.start >= start]
        ids = [*said.ids, *loaded.control_tokens.ids_after(text[start:], rest)]
    return PromptIds(ids, text, refused=refused, state=state, typed=typed)


def _checked_ids(loaded: LoadedModel, ids: Sequence[int]) -> list[int]:
    """The ids of a prompt given as ids. Raises UsageError for ids outside the vocabulary."""
    size = loaded.engine.backbone.vocabulary
    for token in ids:
        if not 0 <= token < size:
            raise UsageError(f"the prompt has the token id {token}: give ids from 0 to {size - 1}")
    return list(ids)


def _raw(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text with the tokenizer's special tokens; a typed BOS is not doubled."""
    ids: list[int] = tokenizer(text)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def encode_latest(loaded: LoadedModel, messages: Sequence[Message], wanted: int) -> PromptIds:
    """Like `encode`, but leaves out the oldest messages of a conversation if the context cannot
    hold it with `wanted` new tokens, or with a quarter of the context if that is less.

    The system prompt stays, and the rest begins with a user message. Messages are dropped in
    steps of a quarter of the context, so that the next turns begin alike and reuse the cache;
    except where the conversation is too long to count. Raises ContextError if the last message
    alone is too long.
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


def count(loaded: LoadedModel, messages: Sequence[Message]) -> Count:
    """How many tokens the last message takes, and how many are left after the conversation. Raises
    ContextError for text that is far too long to tokenise, UsageError without a chat template."""
    before = messages[:-1]
    is_begun = any(message["role"] == "user" for message in before)
    whole = len(encode(loaded, messages).ids)
    taken = len(encode(loaded, before).ids) if is_begun else 0
    return Count(whole - taken, loaded.info.context - whole)


def _rendered(
    loaded: LoadedModel, messages: list[Message], continues: bool, options: Mapping[str, Any]
) -> _Rendering:
    """The conversation up to the place of the assistant's next token. Raises UsageError."""
    hidden: list[str] = []
    parts = [_hidden_part(loaded, one, hidden) for one in messages]
    shown = [_for_template(loaded, *one) for one in zip(messages, parts, strict=True)]
    is_begun = continues and messages and messages[-1]["role"] == "assistant"
    begun = parts[-1] if is_begun else None
    if begun is None:
        text = renderer().render(loaded.tokenizer, shown, options=options)
        state = loaded.markup.after(text)
    elif begun.reasoning:  # rendered in the model's own markup: templates may drop it
        prompt = renderer().render(loaded.tokenizer, shown[:-1], options=options)
        text = prompt + loaded.markup.written(begun, prompt)
        state = "answer" if begun.text else "reasoning"
    else:
        text = renderer().render(loaded.tokenizer, shown, continues=True, options=options)
        trimmed = begun.text.rstrip()  # some templates strip messages; restore the end
        if not text.endswith(begun.text) and text.endswith(trimmed):
            text += begun.text[len(trimmed) :]
        state = "answer"
    return _Rendering(*loaded.control_tokens.restore(text, hidden), state)


def _part(message: Message) -> Part:
    """The reasoning and the text of a message."""
    part = Part(message.get("reasoning", ""), message["content"])
    is_read = message["role"] == "assistant" and not part.reasoning
    return read(part.text) if is_read else part


def _hidden_part(loaded: LoadedModel, message: Message, hidden: list[str]) -> Part:
    """The same, with the text of control tokens hidden."""
    return Part(*(loaded.control_tokens.hide(text, hidden) for text in _part(message)))


def _for_template(loaded: LoadedModel, message: Message, part: Part) -> Message:
    """A message in the form that templates expect. Reasoning has several keys; a template ignores
    those it does not know. Harmony's templates ignore it too, and the first ones failed on it."""
    made = {"role": message["role"], "content": part.text}
    is_told = part.reasoning and loaded.markup != HARMONY
    return made | dict.fromkeys(REASONING, part.reasoning) if is_told else made


def cached_text(loaded: LoadedModel, prompt: PromptIds, event: Finished) -> CachedText | None:
    """The conversation with the answer, which the next turn begins with; None after an error, or if
    the answer ends inside a character. (If the answer was cut at a stop string, the next turn does
    not match this text and is tokenised anew.)"""
    whole = loaded.tokenizer.decode(list(event.token_ids), clean_up_tokenization_spaces=False)
    if event.reason == "error" or whole.endswith(STRAY):
        return None
    ids = [*prompt.ids, *event.token_ids]
    return CachedText(prompt.text + whole, ids, len(prompt.text), prompt.typed)
