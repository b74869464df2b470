"""The tokens that end an assistant's turn, by the checkpoint's files and its chat template."""

from collections.abc import Iterator, Sequence
from typing import Any

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message

# digits, for a template may change the case of what is said
ASKED, THOUGHT, SAID, FOLLOWING = "70416093", "38150264", "92643718", "51873940"
THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # fields of what was thought before
USER, ANSWER = {"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a turn: those of the generation config, the config (where it says more than
    its class has by default) and the tokenizer, and what the chat template writes behind an answer;
    without what it writes inside one, as gpt-oss ends a channel of one."""
    config = model.config.get_text_config()
    told = [one.eos_token_id for one in (model.generation_config, tokenizer)]
    told += [_own_ends(one) for one in (model.config, config)]
    ids = {token for one in told for token in _listed(one)}
    ends, inside = _of_template(tokenizer) if tokenizer.chat_template else (set(), set())
    ids |= ends
    whole = range(int(config.vocab_size))
    return frozenset(token for token in ids - inside or ids if token in whole)


def _own_ends(config: Any) -> object:
    """The end tokens of a config; None for the default of its class, which may be an accident."""
    ids = getattr(config, "eos_token_id", None)
    return None if ids == getattr(type(config), "eos_token_id", None) else ids


def _listed(ids: object) -> list[int]:
    listed = ids if isinstance(ids, list | tuple) else [ids]
    return [token for token in listed if isinstance(token, int)]


def _of_template(tokenizer: Any) -> tuple[set[int], set[int]]:
    """(ends, inside): the added tokens that the template writes behind an assistant's turn and,
    between where the answer begins and what is said, inside one."""
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
    if not ends:  # the next turn's beginning ends this one, as in GLM
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
