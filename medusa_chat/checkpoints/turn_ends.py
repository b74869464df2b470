"""Turn ends: the tokens that end an assistant's turn, from the checkpoint's files and template."""

from collections.abc import Iterator, Sequence
from typing import Any

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message

# digits: templates may change letters' case
ASKED, THOUGHT, SAID, FOLLOWING = "70416093", "38150264", "92643718", "51873940"
THOUGHTS = (  # keys under which templates read reasoning
    "thinking",
    "reasoning_content",
    "reasoning",
)
USER, ANSWER = {"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a turn: those of the generation config, of the config (unless they are just
    its class's default) and of the tokenizer, and the token that the chat template writes after an
    answer; without tokens that it writes inside an answer, such as the ends of gpt-oss' channels.
    """
    config = model.config.get_text_config()
    told = [one.eos_token_id for one in (model.generation_config, tokenizer)]
    told += [_own_ends(one) for one in (model.config, config)]
    ids = {token for one in told for token in _listed(one)}
    ends, inside = _of_template(tokenizer) if tokenizer.chat_template else (set(), set())
    ids |= ends
    whole = range(int(config.vocab_size))
    return frozenset(token for token in ids - inside or ids if token in whole)


def _own_ends(config: Any) -> object:
    """The end tokens of a config; None where they are its class's default and may be unintended."""
    ids = getattr(config, "eos_token_id", None)
    return None if ids == getattr(type(config), "eos_token_id", None) else ids


def _listed(ids: object) -> list[int]:
    listed = ids if isinstance(ids, list | tuple) else [ids]
    return [token for token in listed if isinstance(token, int)]


def _of_template(tokenizer: Any) -> tuple[set[int], set[int]]:
    """(ends, inside): the added tokens that the template writes after an assistant's turn, and
    those inside it, between the start of the answer and its text."""
    thought = {**ANSWER, **dict.fromkeys(THOUGHTS, THOUGHT)}
    text = _rendered(tokenizer, [USER, thought]) or _rendered(tokenizer, [USER, ANSWER])
    before, said, behind = text.rpartition(SAID)
    if not said:
        return set(), set()
    prompt = _rendered(tokenizer, [USER], add_prompt=True)
    start = len(prompt) if prompt and before.startswith(prompt) else -1
    if start < 0:
        start = before.rfind(THOUGHT) if THOUGHT in before else len(before)
    inside = set(_added(tokenizer, before[start:]))
    ends = list(_added(tokenizer, behind))
    if not ends:  # the start of the next turn ends this one, as in GLM
        text = _rendered(tokenizer, [USER, ANSWER, {"role": "user", "content": FOLLOWING}])
        ends = list(_added(tokenizer, text.partition(SAID)[2].partition(FOLLOWING)[0]))
    return set(ends[:1]), inside - set(ends[:1])


def _rendered(tokenizer: Any, messages: Sequence[Message], add_prompt: bool = False) -> str:
    """The text of a conversation; "" where the template refuses it."""
    try:
        return renderer().render(tokenizer, messages, add_prompt)
    except UsageError:
        return ""


def _added(tokenizer: Any, text: str) -> Iterator[int]:
    """The ids of the added tokens in a text, without white space."""
    added = tokenizer.added_tokens_decoder
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if token in added and added[token].content.strip():
            yield token
