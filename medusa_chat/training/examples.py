"""Conversations -> examples of token ids, none longer than a sequence; and their prompts."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example, encode
from medusa_chat.training.reading import Conversation

HELD_OUT_SHARE = 0.02
MOST_HELD_OUT = 128


@dataclass(frozen=True)
class Encoded:
    """Examples, how many were cut to the sequence's length, and how many left out because no
    answer begins within it."""

    examples: tuple[Example, ...]
    cut: int
    left_out: int

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    @property
    def labels(self) -> int:
        return sum(sum(example.is_label) for example in self.examples)


def encode_all(
    tokenizer: Any, conversations: Iterable[Conversation], length: int, vocabulary: int
) -> Encoded:
    """Raises UsageError, naming the row, for one that the template or the vocabulary cannot take,
    and when nothing is left to learn."""
    require_template(tokenizer, conversations := list(conversations))
    examples, cut, left_out = [], 0, 0
    for found in conversations:
        try:
            whole = _whole(tokenizer, found)
        except UsageError as error:
            raise UsageError(f"{found.place}: {error}") from error
        if whole and max(whole[0].ids, default=0) >= vocabulary:
            raise UsageError(
                f"{found.place}: the tokenizer gives token {max(whole[0].ids)} and the backbone "
                f"knows {vocabulary}: they do not belong together"
            )
        cut += not found.text and len(whole[0].ids) > length
        parts = [part for one in whole for part in _parts(one, length, bool(found.text))]
        kept = [part for part in parts if sum(part.is_label) > 1]
        left_out += not kept
        examples += kept
    if not examples:
        raise UsageError(
            "the data holds no row to learn from: none, or no answer begins within "
            f"{length} tokens (--sequence-length)"
        )
    return Encoded(tuple(examples), cut, left_out)


def require_template(tokenizer: Any, conversations: Sequence[Conversation]) -> None:
    """Raises UsageError for a tokenizer that cannot write a conversation."""
    if any(found.messages for found in conversations) and not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template: give a backbone made for chat, or plain text"
        )


def _whole(tokenizer: Any, found: Conversation) -> list[Example]:
    if not found.text:
        ids, is_label = encode(tokenizer, found.messages)
        return [Example(tuple(ids), tuple(is_label), found.place)]
    ids = tuple(tokenizer(found.text, verbose=False)["input_ids"])
    return [Example(ids, (True,) * len(ids), found.place)]


def _parts(example: Example, length: int, is_plain: bool) -> list[Example]:
    """The first `length` tokens; of a plain text all of them, a part at a time."""
    end = len(example.ids) if is_plain else min(length, len(example.ids))
    return [
        Example(example.ids[s : s + length], example.is_label[s : s + length], example.place)
        for s in range(0, end, length)
    ]


def split(items: Sequence[Any], seed: int) -> tuple[list[Any], list[Any]]:
    """(to learn, held out): the latter a fiftieth, one at least and 128 at most; of a single item
    both are that one."""
    if len(items) < 2:
        return list(items), list(items)
    count = min(max(round(len(items) * HELD_OUT_SHARE), 1), MOST_HELD_OUT)
    chosen = set(random.Random(seed).sample(range(len(items)), count))
    learnt = [item for index, item in enumerate(items) if index not in chosen]
    return learnt, [items[index] for index in sorted(chosen)]
