"""The token ids of a prompt: a text, or a conversation whose earlier turns keep their ids."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.detokenizer import STRAY
from medusa_chat.decoding.events import Finished
from medusa_chat.errors import ContextError, UsageError
from medusa_chat.messages import Message, Text
from medusa_chat.runtime.prompt_length import refuse_endless


def encode(loaded: LoadedModel, prompt: Text) -> tuple[list[int], str]:
    """The prompt's token ids and the text they stand for.

    A conversation is rendered by the tokenizer's chat template; where its last message is the
    assistant's, the text ends inside it and the answer continues it. The text up to the end of
    the last answer keeps its ids: only what follows is tokenised, so that the cache is reused.
    Raises ContextError for what is far too long to be tokenised.
    """
    tokenizer, context = loaded.tokenizer, loaded.info.context
    if isinstance(prompt, str):
        refuse_endless(tokenizer, prompt, context)
        return _raw(tokenizer, prompt), prompt
    if not tokenizer.chat_template:
        raise UsageError(f"{loaded.info.name} has no chat template: use --raw with --prompt")
    messages = [_neutral(tokenizer, message) for message in prompt]
    text = _rendered(loaded, messages)
    refuse_endless(tokenizer, text, context)
    said, ids = loaded.said
    if said and text.startswith(said):
        rest = tokenizer(text[len(said) :], add_special_tokens=False)["input_ids"]
        return [*ids, *rest], text
    return tokenizer(text, add_special_tokens=False)["input_ids"], text


def _raw(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text with what the tokenizer puts around it; BOS once where it is typed too."""
    ids: list[int] = tokenizer(text)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def encode_latest(
    loaded: LoadedModel, messages: Sequence[Message], wanted: int
) -> tuple[list[int], str, int]:
    """`encode` of a conversation without its oldest messages, where the context would not hold it
    and `wanted` new tokens, or a quarter of the context where that is less -> ids, text, and how
    many messages were left out.

    The system prompt stays, and a user's message comes first. Tokens are dropped by quarters of the
    context, so that some turns to come begin alike and the cache is reused; not of a conversation
    that is too long to be counted. Raises ContextError where the last message is.
    """
    part = -(-loaded.info.context // 4)
    most = loaded.info.context - min(wanted, part)
    asked = [at for at, message in enumerate(messages) if message["role"] == "user"][1:]
    with suppress(ContextError) if asked else nullcontext():
        ids, text = encode(loaded, messages)
        if len(ids) <= most or not asked:
            return ids, text, 0
        most = len(ids) - part * -(-(len(ids) - most) // part)
    system = [one for one in messages[:1] if one["role"] == "system"]

    def of(start: int) -> tuple[list[int], str]:
        return encode(loaded, [*system, *messages[start:]])

    def fits(start: int) -> bool:
        with suppress(ContextError):
            return len(of(start)[0]) <= most
        return False

    place = bisect_left(asked[:-1], True, key=fits)
    return *of(asked[place]), asked[place] - len(system)


def _rendered(loaded: LoadedModel, messages: list[Message]) -> str:
    """The conversation as text, up to where the assistant's next token belongs. Raises UsageError:
    a template may refuse roles or their order in its own words."""
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    text = renderer().render(loaded.tokenizer, messages, continues=continues)
    if continues:
        ending = messages[-1]["content"]
        trimmed = ending.rstrip()  # some templates strip a message; what it ends with is its own
        if not text.endswith(ending) and text.endswith(trimmed):
            text += ending[len(trimmed) :]
    return text


def _neutral(tokenizer: Any, message: Message) -> Message:
    """The message with special tokens in its text broken up, so that they stay plain text."""
    content = message["content"]
    added = tokenizer.added_tokens_decoder.values()
    for token in {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}:
        content = content.replace(token, f"{token[:1]}\u200b{token[1:]}")
    return {**message, "content": content}


def said_so_far(
    loaded: LoadedModel, text: str, ids: list[int], event: Finished
) -> tuple[str, list[int]]:
    """The conversation with the answer, text and ids, for the next turn to begin with; empty where
    the answer's text is not that of its ids (a stop string, half a character, an error)."""
    whole = loaded.tokenizer.decode(list(event.token_ids), clean_up_tokenization_spaces=False)
    if event.reason == "error" or whole != event.text or whole.endswith(STRAY):
        return "", []
    return text + event.text, [*ids, *event.token_ids]
