"""Conversations -> examples of token ids, none longer than a sequence; and their prompts."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.training.conversations import Conversation
from medusa_chat.training.data import Example, encode

HELD_OUT_SHARE = 0.02
MOST_HELD_OUT = 128


@dataclass(frozen=True)
class EncodedExamples:
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
) -> EncodedExamples:
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
    return EncodedExamples(tuple(examples), cut, left_out)


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
    if not is_plain:
        return [Example(example.ids[:length], example.is_label[:length], example.place)]
    where = f"{example.place}, part"
    starts = range(0, len(example.ids), length)
    return [
        Example(part := example.ids[start : start + length], (True,) * len(part), f"{where} {n}")
        for n, start in enumerate(starts, start=1)
    ]


def split(examples: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """(to learn, held out), no conversation in both: of these a fiftieth is held out, one at least
    and 128 at most; of a single one both are that one."""
    places = list(dict.fromkeys(example.place for example in examples))
    if len(places) < 2:
        return list(examples), list(examples)
    count = min(max(round(len(places) * HELD_OUT_SHARE), 1), MOST_HELD_OUT)
    chosen = set(random.Random(seed).sample(places, count))
    learnt = [example for example in examples if example.place not in chosen]
    return learnt, [example for example in examples if example.place in chosen]
