"""Example and Batch: conversations as token ids with their labels, and batches of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.errors import ConversationRefused
from medusa_chat.messages import Message


@dataclass(frozen=True)
class Example:
    """Token ids and, for each, whether it is a label, a token that is learnt. place: the file and
    line it comes from, for errors."""

    ids: tuple[int, ...]
    is_label: tuple[bool, ...]
    place: str = ""

    @property
    def labels(self) -> list[int]:
        """The ids that are labels."""
        return [token for token, is_label in zip(self.ids, self.is_label, strict=True) if is_label]


@dataclass(frozen=True)
class Batch:
    """Examples, a row each, padded on the right with id 0: ids [b, t] int64, is_label [b, t] bool.

    Under causal attention no token attends to what is to its right, so the rows need no mask.
    Neither padding nor the first token of an example is a label: nothing predicts that.
    """

    ids: Tensor
    is_label: Tensor

    @property
    def next_ids(self) -> Tensor:
        """[b, t] int64: the token after each, 0 after the last; where a head has a target it is
        the root."""
        return torch.nn.functional.pad(self.ids[:, 1:], (0, 1))


def encode(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Ids of a conversation by the tokenizer's chat template, and which of them are labels.

    Labels are the assistant's tokens and the end token that closes its turn, nothing else; a first
    message of the assistant answers nothing and has none. They are found by rendering every prefix
    of the conversation, once with the generation prompt and once with the answer: each must be a
    prefix of the whole. Raises ConversationRefused where the template rewrites earlier turns, since
    it does not show where an answer begins.
    """
    text = render(tokenizer, messages)
    borders: list[int] = []  # in the text: before and behind each answer
    for turn, message in enumerate(messages):
        if turn and message["role"] == "assistant":
            prompt = render(tokenizer, messages[:turn], add_prompt=True)
            answered = render(tokenizer, messages[: turn + 1])
            borders += [_border(prompt, text, turn), _border(answered, text, turn)]
    ids, places = _split(tokenizer, text, borders)
    is_label = [False] * len(ids)
    special = set(tokenizer.all_special_ids)
    for start, stop in zip(places[::2], places[1::2], strict=True):
        stop = _turn_end(ids, start, stop, special)
        is_label[start:stop] = [True] * (stop - start)
    return ids, is_label


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation with the generation prompt, for the assistant to answer."""
    return _ids(tokenizer, render(tokenizer, messages, add_prompt=True))


def render(tokenizer: Any, messages: Sequence[Message], add_prompt: bool = False) -> str:
    """The conversation as text. add_prompt: with the generation prompt. Raises UsageError."""
    return renderer().render(tokenizer, messages, add_prompt)


def _ids(tokenizer: Any, text: str) -> list[int]:
    # verbose: without a warning on stderr for texts longer than the context, which callers refuse
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _border(prefix: str, text: str, turn: int) -> int:
    """Where a prefix of the text ends in it."""
    if not text.startswith(prefix):
        raise ConversationRefused(
            f"the chat template changes message {turn + 1} when others follow it: end the "
            "conversation there, or use a tokenizer whose template keeps earlier messages"
        )
    return len(prefix)


def _split(tokenizer: Any, text: str, borders: Sequence[int]) -> tuple[list[int], list[int]]:
    """The text's ids, and how many of them stand before each border. Where a token would go across
    one (an answer that begins with a blank line), the pieces between are tokenised one by one, as
    decoding has the prompt's ids first."""
    ids = _ids(tokenizer, text)
    before = [_ids(tokenizer, text[:border]) for border in borders]
    if all(ids[: len(part)] == part for part in before):
        return ids, [len(part) for part in before]
    pieces = [_ids(tokenizer, text[a:b]) for a, b in pairwise((0, *borders, len(text)))]
    places = list(accumulate(map(len, pieces)))[:-1]
    return [token for piece in pieces for token in piece], places


def _turn_end(ids: list[int], start: int, stop: int, special: set[int]) -> int:
    """The index after the turn's last special token, since what follows is never generated."""
    ends = [place for place in range(start, stop) if ids[place] in special]
    return ends[-1] + 1 if ends else stop


def group_by_length(examples: Sequence[Example], tokens: int, seed: int) -> list[list[Example]]:
    """Every example once, in batches of similar lengths of at most `tokens` ids, padding included.

    A longer example is a batch of its own. The number of batches does not depend on the seed.
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
    """One batch on the CPU, its rows padded to the longest."""
    shape = (len(examples), max(len(example.ids) for example in examples))
    ids, is_label = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for row, example in enumerate(examples):
        length = len(example.ids)
        ids[row, :length] = torch.tensor(example.ids)
        is_label[row, 1:length] = torch.tensor(example.is_label[1:], dtype=torch.bool)
    return Batch(ids, is_label)
