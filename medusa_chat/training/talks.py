"""Self-distillation of whole conversations: every question in order, after the backbone's own
answers to the ones before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example, encode_prompt
from medusa_chat.training.distill import Answer, DistillRecipe, answer_prompts
from medusa_chat.training.reading import Conversation

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answered:
    """done of total questions are answered, in `tokens` tokens. total falls when a conversation
    ends before its last question. example: the last answer, with its conversation as prompt."""

    done: int
    total: int
    tokens: int
    example: Example | None = None


def answer_conversations(
    model: Any,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    recipe: DistillRecipe,
    length: int,
    folder: Path,
) -> Iterator[Answered]:
    """One event an answer. Each turn's answers are a file of the folder, written as they come, so
    that an interrupted run goes on. A conversation ends where its next prompt leaves no room for an
    answer within `length` tokens. Raises UsageError where no prompt fits."""
    folder.mkdir(parents=True, exist_ok=True)
    talks = {i: _start(found) for i, found in enumerate(conversations)}
    done, tokens = 0, 0
    for turn in range(max((len(found.asked) for found in conversations), default=0)):
        prompts: dict[int, list[int]] = {}
        for index, talk in talks.items():
            ids = _next_prompt(tokenizer, talk, conversations[index], turn)
            if ids and len(ids) + recipe.max_new_tokens <= length:
                prompts[index] = ids
        if not prompts:
            break
        left = sum(len(conversations[i].asked) - turn for i in prompts)
        order = list(prompts)
        turns = replace(recipe, seed=recipe.seed + 100_003 * turn)
        answers = answer_prompts(
            model, list(prompts.values()), turns, folder / f"answers-{turn + 1}.jsonl"
        )
        start = done
        for answer in answers:
            index = order[answer.index]
            done, tokens = done + 1, tokens + len(answer.answer_ids)
            text = tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
            talks[index].append({"role": "assistant", "content": text})
            yield Answered(done, start + left, tokens, _example(answer, conversations[index]))
        talks = {i: talk for i, talk in talks.items() if i in prompts}
    if not done:
        raise UsageError(
            f"no prompt leaves room for an answer within {length} tokens: raise --sequence-length"
        )


def _start(found: Conversation) -> Messages:
    return [dict(m) for m in found.messages if m["role"] == "system"][:1]


def _next_prompt(
    tokenizer: Any, talk: Messages, found: Conversation, turn: int
) -> list[int] | None:
    """Ids after the next question, which is put into the talk; None where there is none."""
    if turn >= len(found.asked):
        return None
    talk.append({"role": "user", "content": found.asked[turn]})
    try:
        return encode_prompt(tokenizer, talk)
    except UsageError as error:
        raise UsageError(f"{found.place}: {error}") from error


def _example(answer: Answer, found: Conversation) -> Example | None:
    """None for an answer too short to teach a head anything."""
    return replace(answer.example, place=found.place) if len(answer.answer_ids) > 2 else None
