"""The token ids of a prompt: a text, or a conversation whose earlier turns keep their ids."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.checkpoints.control_tokens import Typed
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.events import Finished
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message, Text
from medusa_chat.runtime.turns import rendered


class PromptIds(NamedTuple):
    """A prompt's ids and the text they stand for. left_out: how many messages of its beginning the
    context has no room for. refused: what the chat template does not take, in words."""

    ids: list[int]
    text: str
    left_out: int = 0
    refused: str = ""


def encode(loaded: LoadedModel, prompt: Text) -> PromptIds:
    """The ids of a prompt.

    A conversation is rendered by the tokenizer's chat template; where its last message is the
    assistant's, the text ends inside it and the answer continues it. What its messages say is text
    (ControlTokens). The text up to the end of the last answer keeps its ids: only what follows is
    tokenised, so that the cache is reused.
    """
    if isinstance(prompt, str):
        return PromptIds(loaded.tokenizer(prompt)["input_ids"], prompt)
    if not loaded.tokenizer.chat_template:
        raise UsageError(f"{loaded.info.name} has no chat template: use --raw with --prompt")
    (text, typed), refused = rendered(prompt, lambda messages: _rendered(loaded, messages))
    said, ids = loaded.said
    if not said or not text.startswith(said):
        return PromptIds(loaded.control_tokens.ids(text, typed), text, refused=refused)
    start = len(said)
    rest = [Typed(one.start - start, one.end - start) for one in typed if one.start >= start]
    new = loaded.control_tokens.ids_after(text[start:], rest)
    return PromptIds([*ids, *new], text, refused=refused)


def encode_latest(loaded: LoadedModel, messages: Sequence[Message], wanted: int) -> PromptIds:
    """`encode` of a conversation without its oldest messages, where the context would not hold it
    and `wanted` new tokens, or a quarter of the context where that is less.

    The system prompt stays, and a user's message comes first. Tokens are dropped by quarters of the
    context, so that some turns to come begin alike and the cache is reused.
    """
    whole = encode(loaded, messages)
    part = -(-loaded.info.context // 4)
    over = len(whole.ids) + min(wanted, part) - loaded.info.context
    asked = [at for at, message in enumerate(messages) if message["role"] == "user"][1:]
    if over <= 0 or not asked:
        return whole
    most = len(whole.ids) - part * -(-over // part)
    system = [one for one in messages[:1] if one["role"] == "system"]

    def of(start: int) -> PromptIds:
        return encode(loaded, [*system, *messages[start:]])

    place = bisect_left(asked[:-1], True, key=lambda start: len(of(start).ids) <= most)
    return of(asked[place])._replace(left_out=asked[place] - len(system))


def _rendered(loaded: LoadedModel, messages: list[Message]) -> tuple[str, list[Typed]]:
    """The conversation as text, up to where the assistant's next token belongs, and where in it
    messages hold the text of control tokens. Raises UsageError."""
    hidden: list[str] = []
    hide = loaded.control_tokens.hide
    messages = [
        one if _begins_with_reasoning(one) else {**one, "content": hide(one["content"], hidden)}
        for one in messages
    ]
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    text = renderer().render(loaded.tokenizer, messages, continues=continues)
    if continues:
        ending = messages[-1]["content"]
        trimmed = ending.rstrip()  # some templates strip a message; what it ends with is its own
        if not text.endswith(ending) and text.endswith(trimmed):
            text += ending[len(trimmed) :]
    return loaded.control_tokens.restore(text, hidden)


def _begins_with_reasoning(message: Message) -> bool:
    """Whether it is an answer that templates take apart at its tags."""
    return message["role"] == "assistant" and message["content"].lstrip().startswith("<think>")


def said_so_far(
    loaded: LoadedModel, text: str, ids: list[int], event: Finished
) -> tuple[str, list[int]]:
    """The conversation with the answer, text and ids, for the next turn to begin with; empty where
    the answer's text is not that of its ids (a stop string, half a character, an error)."""
    whole = loaded.tokenizer.decode(list(event.token_ids), clean_up_tokenization_spaces=False)
    if event.reason == "error" or whole != event.text:
        return "", []
    return text + event.text, [*ids, *event.token_ids]
