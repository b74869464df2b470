"""Example: a text as token ids with its labels, made from conversations; and batches of them."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.errors import ConversationRefused, UsageError
from medusa_chat.messages import Message
from medusa_chat.training.conversations import Conversation, left_out_line

HELD_OUT_SHARE = 0.02
FEW_HELD_OUT, MOST_HELD_OUT = 8, 128


@dataclass(frozen=True)
class Example:
    """Token ids and, for each, whether it is a label, a token to learn. place: the file and line it
    comes from, for errors."""

    ids: tuple[int, ...]
    is_label: tuple[bool, ...]
    place: str = ""

    @property
    def labels(self) -> list[int]:
        """The ids that are labels."""
        return [token for token, is_label in zip(self.ids, self.is_label, strict=True) if is_label]


class EarlierTurnRewritten(ConversationRefused):
    """The chat template renders an answer in another way when messages follow it."""


# --------------------------------------------------------------------------- one conversation


def encode(
    tokenizer: Any, messages: Sequence[Message], place: str = "", only_last: bool = False
) -> Example:
    """A conversation as the tokenizer's chat template renders it.

    Labels are the assistant's tokens and the end token that closes its turn, nothing else; a first
    message of the assistant answers nothing and has none. only_last: the labels of the last answer
    alone. Answers are located by rendering each prefix of the conversation, with the generation
    prompt and with the answer: both must be prefixes of the whole. Raises EarlierTurnRewritten
    where they are not.
    """
    text = render(tokenizer, messages)
    turns = answer_turns(messages)
    borders: list[int] = []  # in the text: before and after each answer
    for turn in turns[-1:] if only_last else turns:
        prompt = render(tokenizer, messages[:turn], add_prompt=True)
        is_last = turn + 1 == len(messages)
        answered = text if is_last else render(tokenizer, messages[: turn + 1])
        borders += [_border(prompt, text, turn), _border(answered, text, turn)]
    ids, places = _tokenize(tokenizer, text, borders)
    is_label = [False] * len(ids)
    special = set(tokenizer.all_special_ids)
    for start, stop in zip(places[::2], places[1::2], strict=True):
        stop = _turn_end(ids, start, stop, special)
        is_label[start:stop] = [True] * (stop - start)
    return Example(tuple(ids), tuple(is_label), place)


def encode_answers(
    tokenizer: Any, messages: Sequence[Message], place: str = ""
) -> tuple[Example, ...]:
    """A conversation as one example; an example for each answer, with the conversation up to it,
    where the template rewrites earlier answers (Qwen3's leaves out their reasoning). Raises
    ConversationRefused."""
    try:
        return (encode(tokenizer, messages, place),)
    except EarlierTurnRewritten:
        turns = answer_turns(messages)
        return tuple(encode(tokenizer, messages[: turn + 1], place, True) for turn in turns)


def answer_turns(messages: Sequence[Message]) -> list[int]:
    """The places of the answers: the assistant's messages after the first message."""
    return [turn for turn, m in enumerate(messages) if turn and m["role"] == "assistant"]


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation with the generation prompt, for the assistant to answer."""
    return ids_of(tokenizer, render(tokenizer, messages, add_prompt=True))


def render(tokenizer: Any, messages: Sequence[Message], add_prompt: bool = False) -> str:
    """The conversation as text. add_prompt: with the generation prompt. Raises UsageError."""
    return renderer().render(tokenizer, messages, add_prompt)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """The ids of a rendered text, which has its special tokens already."""
    # verbose: without a warning on stderr for texts longer than the context, which callers refuse
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _border(prefix: str, text: str, turn: int) -> int:
    """Where a prefix of the text ends in it."""
    if not text.startswith(prefix):
        raise EarlierTurnRewritten(
            f"the chat template changes message {turn + 1} when others follow it: end the "
            "conversation there, or use a tokenizer whose template keeps earlier messages"
        )
    return len(prefix)


def _tokenize(tokenizer: Any, text: str, borders: Sequence[int]) -> tuple[list[int], list[int]]:
    """The text's ids, and how many of them come before each border. Where a token would cross one
    (an answer that begins with a blank line), the pieces between are tokenised one by one, as
    decoding has the prompt's ids first."""
    ids = ids_of(tokenizer, text)
    before = [ids_of(tokenizer, text[:border]) for border in borders]
    if all(ids[: len(part)] == part for part in before):
        return ids, [len(part) for part in before]
    pieces = [ids_of(tokenizer, text[a:b]) for a, b in pairwise((0, *borders, len(text)))]
    places = list(accumulate(map(len, pieces)))[:-1]
    return [token for piece in pieces for token in piece], places


def _turn_end(ids: list[int], start: int, stop: int, special: set[int]) -> int:
    """The index after the turn's last special token, since what follows is never generated."""
    ends = [place for place in range(start, stop) if ids[place] in special]
    return ends[-1] + 1 if ends else stop


# ------------------------------------------------------------------------------- many of them


@dataclass(frozen=True)
class EncodedExamples:
    """Examples, and a line on each thing that was cut, left out or encoded in another way."""

    examples: tuple[Example, ...]
    notes: tuple[str, ...] = ()


def encode_all(
    tokenizer: Any, conversations: Sequence[Conversation], length: int, vocabulary: int
) -> EncodedExamples:
    """Encode conversations as examples of at most `length` tokens; a plain text gives several.
    Raises UsageError, with the file and line, for a row that does not fit the vocabulary, and when
    no example is left."""
    require_template(tokenizer, conversations)
    examples, refused, cut, empty, per_answer = list[Example](), list[str](), 0, 0, 0
    for one in conversations:
        try:
            whole = _encode(tokenizer, one)
        except ConversationRefused as error:
            refused.append(f"{one.place}: {error}")
            continue
        except UsageError as error:
            raise UsageError(f"{one.place}: {error}") from error
        _require_vocabulary(whole, vocabulary)
        per_answer += len(whole) > 1
        cut += not one.text and any(len(example.ids) > length for example in whole)
        parts = [part for example in whole for part in _parts(example, length, bool(one.text))]
        usable = [part for part in parts if sum(part.is_label) > 1]
        empty += not usable
        examples += usable
    if not examples and refused:
        raise UsageError(refused[0])
    if not examples:
        raise UsageError(
            f"the data has no usable example: no answer of two tokens begins within {length} "
            "tokens; raise --sequence-length, or give other --data"
        )
    notes = [
        (len(refused), left_out_line(refused, f"{len(conversations):,} conversations")),
        (
            per_answer,
            f"{per_answer:,} rows give an example for each answer: the chat template rewrites "
            "earlier ones",
        ),
        (cut, f"{cut} rows are cut to {length} tokens"),
        (empty, f"{empty} rows are skipped: no answer of two tokens begins within {length}"),
    ]
    return EncodedExamples(tuple(examples), tuple(line for count, line in notes if count))


def require_template(tokenizer: Any, conversations: Iterable[Conversation]) -> None:
    """Raises UsageError where conversations need a chat template and the tokenizer has none."""
    if any(one.messages for one in conversations) and not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template: use a chat model as the backbone, or plain text"
        )


def _require_vocabulary(examples: Sequence[Example], vocabulary: int) -> None:
    for one in examples:
        if (largest := max(one.ids, default=0)) >= vocabulary:
            raise UsageError(
                f"{one.place}: the tokenizer gives token {largest}, but the backbone's vocabulary "
                f"has {vocabulary}: use the backbone's own tokenizer"
            )


def _encode(tokenizer: Any, one: Conversation) -> tuple[Example, ...]:
    if not one.text:
        return encode_answers(tokenizer, one.messages, one.place)
    ids = tuple(tokenizer(one.text, verbose=False)["input_ids"])
    return (Example(ids, (True,) * len(ids), one.place),)


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
    training = [example for example in examples if example.place not in chosen]
    return training, [example for example in examples if example.place in chosen]


# ------------------------------------------------------------------------------------ batches


@dataclass(frozen=True)
class Batch:
    """Examples, one per row, padded on the right with id 0: ids [b, t] int64, is_label [b, t] bool.

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
