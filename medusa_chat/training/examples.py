"""Conversations encoded as examples of limited length, and split into training and held-out."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_chat.errors import ConversationRefused, UsageError
from medusa_chat.training.conversations import Conversation, left_out_line
from medusa_chat.training.data import Example, encode

HELD_OUT_SHARE = 0.02
FEW_HELD_OUT, MOST_HELD_OUT = 8, 128


@dataclass(frozen=True)
class EncodedExamples:
    """Examples; the number of conversations cut to the sequence length, and of those left out
    because no answer of two tokens begins within it. note: what the chat template refused, in one
    line; empty where it took all."""

    examples: tuple[Example, ...]
    cut: int
    left_out: int
    note: str = ""


def encode_all(
    tokenizer: Any, conversations: Iterable[Conversation], length: int, vocabulary: int
) -> EncodedExamples:
    """Encode conversations as examples of at most `length` tokens; a plain text gives several.
    Raises UsageError, with the file and line, for a row that does not fit the vocabulary, and when
    no example is left."""
    require_template(tokenizer, conversations := list(conversations))
    examples, refused, cut, left_out = list[Example](), list[str](), 0, 0
    for found in conversations:
        try:
            whole = _whole(tokenizer, found)
        except ConversationRefused as error:
            refused.append(f"{found.place}: {error}")
            continue
        except UsageError as error:
            raise UsageError(f"{found.place}: {error}") from error
        if whole and max(whole[0].ids, default=0) >= vocabulary:
            raise UsageError(
                f"{found.place}: the tokenizer gives token {max(whole[0].ids)}, but the backbone's "
                f"vocabulary has {vocabulary}: use the backbone's own tokenizer"
            )
        cut += not found.text and len(whole[0].ids) > length
        parts = [part for one in whole for part in _parts(one, length, bool(found.text))]
        kept = [part for part in parts if sum(part.is_label) > 1]
        left_out += not kept
        examples += kept
    if not examples and refused:
        raise UsageError(refused[0])
    if not examples:
        raise UsageError(
            f"the data has no usable example: no answer of two tokens begins within {length} "
            "tokens; raise --sequence-length, or give other --data"
        )
    note = left_out_line(refused, f"{len(conversations):,} conversations")
    return EncodedExamples(tuple(examples), cut, left_out, note)


def require_template(tokenizer: Any, conversations: Sequence[Conversation]) -> None:
    """Raises UsageError where conversations need a chat template and the tokenizer has none."""
    if any(found.messages for found in conversations) and not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template: use a chat model as the backbone, or plain text"
        )


def _whole(tokenizer: Any, found: Conversation) -> list[Example]:
    if not found.text:
        ids, is_label = encode(tokenizer, found.messages)
        return [Example(tuple(ids), tuple(is_label), found.place)]
    ids = tuple(tokenizer(found.text, verbose=False)["input_ids"])
    return [Example(ids, (True,) * len(ids), found.place)]


def _parts(example: Example, length: int, is_plain: bool) -> list[Example]:
    """The first `length` tokens; all tokens of a plain text, in parts of `length`."""
    if not is_plain:
        return [Example(example.ids[:length], example.is_label[:length], example.place)]
    where = f"{example.place}, part"
    starts = range(0, len(example.ids), length)
    return [
        Example(part := example.ids[start : start + length], (True,) * len(part), f"{where} {n}")
        for n, start in enumerate(starts, start=1)
    ]


def split(examples: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """(training, held-out) examples, no conversation in both. A fiftieth of the conversations is
    held out, of few a tenth up to FEW_HELD_OUT, at least one and at most 128; a single conversation
    is in both. Each part of a plain text counts as a conversation: parts share no token, but one
    text may have some on either side, so that a few long texts are not held out whole."""
    places = list(dict.fromkeys(example.place for example in examples))
    if len(places) < 2:
        return list(examples), list(examples)
    few = min(round(len(places) / 10), FEW_HELD_OUT)
    count = min(max(round(len(places) * HELD_OUT_SHARE), few, 1), MOST_HELD_OUT)
    chosen = set(random.Random(seed).sample(places, count))
    learnt = [example for example in examples if example.place not in chosen]
    return learnt, [example for example in examples if example.place in chosen]
