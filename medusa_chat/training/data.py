"""Conversations: read, encoded with their labels marked, and batched without crossing."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from medusa_chat.errors import UsageError

ROLES = ("system", "user", "assistant")
Message = Mapping[str, str]


@dataclass(frozen=True)
class Conversation:
    """Messages of {"role", "content"}, and the file and line they came from."""

    messages: tuple[Message, ...]
    place: str


@dataclass(frozen=True)
class Example:
    """Token ids and, for each, whether it is to be learnt. place names it in errors."""

    ids: tuple[int, ...]
    is_label: tuple[bool, ...]
    place: str = ""


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right with id 0: ids [b, t] int64, is_label [b, t] bool.

    Under causal attention no token sees what is to its right, so the padding changes nothing and
    no mask is needed; padding is never a label.
    """

    ids: Tensor
    is_label: Tensor
    examples: tuple[Example, ...]


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Rows of a JSONL file of {"messages": [...]}. Raises UsageError with the line of a bad one."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield Conversation(_messages(line, place), place)


def _messages(line: str, place: str) -> tuple[Message, ...]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}: not JSON: {error.msg}") from error
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UsageError(f'{place}: a row needs "messages", a list that is not empty')
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UsageError(f"{place}: a message needs a role: one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise UsageError(f"{place}: a message needs a content that is text")
    if not any(message["role"] == "assistant" for message in messages):
        raise UsageError(f"{place}: no message of the assistant, so nothing to learn")
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)


def encode(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Ids of a conversation by the tokenizer's chat template, and which of them are labels.

    Labels are the assistant's tokens and the end token that closes its turn, nothing else. Found
    by rendering every prefix, once with the generation prompt and once with the answer: each must
    be a prefix of the whole, as text and as ids. Raises UsageError for a template that rewrites
    earlier turns, since its labels cannot be told from its prompts.
    """
    text = render(tokenizer, messages)
    ids = _ids(tokenizer, text)
    is_label = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = render(tokenizer, messages[:turn], ask=True)
            start = _prefix(tokenizer, asked, text, ids, turn)
            answered = render(tokenizer, messages[: turn + 1])
            stop = _prefix(tokenizer, answered, text, ids, turn)
            stop = _turn_end(ids, start, stop, set(tokenizer.all_special_ids))
            is_label[start:stop] = [True] * (stop - start)
    return ids, is_label


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation that the assistant is to answer next."""
    return _ids(tokenizer, render(tokenizer, messages, ask=True))


def render(tokenizer: Any, messages: Sequence[Message], ask: bool = False) -> str:
    """The conversation as text; ask: with the generation prompt. Raises UsageError."""
    if not tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template: give a backbone made for chat")
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=ask
        )
    except TemplateError as error:
        raise UsageError(f"the chat template refuses the conversation: {error}") from error
    return text


def _ids(tokenizer: Any, text: str) -> list[int]:
    # verbose: what is longer than the context is the caller's to refuse, not a line on stderr
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _prefix(tokenizer: Any, prefix: str, text: str, ids: list[int], turn: int) -> int:
    """How many of `ids` the prefix of the text takes."""
    start = _ids(tokenizer, prefix)
    if not text.startswith(prefix) or ids[: len(start)] != start:
        raise UsageError(
            f"the chat template does not write message {turn + 1} the same way alone and in the "
            "whole conversation: cut the conversation there or give a plain template"
        )
    return len(start)


def _turn_end(ids: list[int], start: int, stop: int, special: set[int]) -> int:
    """Just behind the turn's last special token: what follows it is never generated."""
    ends = [place for place in range(start, stop) if ids[place] in special]
    return ends[-1] + 1 if ends else stop


def grouped(examples: Sequence[Example], tokens: int, seed: int) -> list[list[Example]]:
    """Every example once, in batches of like lengths of at most `tokens` ids, padding counted.

    An example longer than that is a batch of its own. The number of batches does not depend on
    the seed.
    """
    shuffle = random.Random(seed)
    order = shuffle.sample(list(examples), len(examples))
    order.sort(key=lambda example: len(example.ids))
    groups: list[list[Example]] = []
    for example in order:
        if not groups or (len(groups[-1]) + 1) * len(example.ids) > tokens:
            groups.append([])
        groups[-1].append(example)
    shuffle.shuffle(groups)
    return groups


def collate(examples: Sequence[Example]) -> Batch:
    """One batch, padded on the right to the longest example."""
    shape = (len(examples), max(len(example.ids) for example in examples))
    ids = torch.zeros(shape, dtype=torch.long)
    is_label = torch.zeros(shape, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        is_label[row, : len(example.ids)] = torch.tensor(example.is_label)
    return Batch(ids, is_label, tuple(examples))
