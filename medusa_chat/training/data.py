"""Conversations: encoded with their labels marked, and batched or packed without crossing."""

import random
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from medusa_chat.errors import UsageError

Message = Mapping[str, str]


@dataclass(frozen=True)
class Example:
    """Token ids and, for each, whether it is to be learnt. place names it in errors."""

    ids: tuple[int, ...]
    is_label: tuple[bool, ...]
    place: str = ""

    @property
    def labels(self) -> list[int]:
        """The ids that are to be learnt."""
        return [token for token, is_label in zip(self.ids, self.is_label, strict=True) if is_label]


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right with id 0: ids [b, t] int64, is_label [b, t] bool.

    A row is an example: under causal attention no token sees what is to its right, so the padding
    changes nothing and no mask is needed; padding is never a label. A packed row holds several:
    owners [b, t] int64 says which of `examples` a token belongs to (-1: padding), positions [b, t]
    counts from 0 in each, and `mask` keeps them apart.
    """

    ids: Tensor
    is_label: Tensor
    examples: tuple[Example, ...]
    owners: Tensor | None = None
    positions: Tensor | None = None

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Additive [b, 1, t, t]: a token sees its own example up to itself. None: plain causal."""
        if self.owners is None:
            return None
        owners = self.owners.to(device)
        same = (owners.unsqueeze(1) == owners.unsqueeze(2)).tril().unsqueeze(1)
        return torch.zeros(same.shape, dtype=dtype, device=device).masked_fill(~same, -torch.inf)


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


def group_by_length(examples: Sequence[Example], tokens: int, seed: int) -> list[list[Example]]:
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


def pack_rows(examples: Sequence[Example], length: int, seed: int) -> list[list[Example]]:
    """Every example once, several to a row of at most `length` ids; the fullest row that still has
    room takes the next. Longer examples have a row each."""
    order = random.Random(seed).sample(list(examples), len(examples))
    order.sort(key=lambda example: -len(example.ids))
    rows: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # ids left, row; sorted
    for example in order:
        place = bisect_left(room, (len(example.ids), 0))
        left, row = room.pop(place) if place < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(example)
        insort(room, (left - len(example.ids), row))
    return rows


def shuffle_rows(
    rows: Sequence[list[Example]], at_once: int, seed: int
) -> list[list[list[Example]]]:
    """The packed rows in another order, `at_once` to a batch."""
    order = random.Random(seed).sample(list(rows), len(rows))
    return [order[start : start + at_once] for start in range(0, len(order), at_once)]


def collate_packed(rows: Sequence[Sequence[Example]]) -> Batch:
    """One batch of packed rows, padded on the right to the longest. The first token of an example
    is no label: nothing in the row says what it will be."""
    examples = tuple(example for row in rows for example in row)
    shape = (len(rows), max(sum(len(e.ids) for e in row) for row in rows))
    ids, positions = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    owners = torch.full(shape, -1, dtype=torch.long)
    is_label = torch.zeros(shape, dtype=torch.bool)
    number = 0
    for place, row in enumerate(rows):
        start = 0
        for example in row:
            part = slice(start, start + len(example.ids))
            ids[place, part] = torch.tensor(example.ids)
            is_label[place, part] = torch.tensor(example.is_label)
            is_label[place, start] = False
            positions[place, part] = torch.arange(len(example.ids))
            owners[place, part] = number
            number, start = number + 1, part.stop
    return Batch(ids, is_label, examples, owners, positions)
