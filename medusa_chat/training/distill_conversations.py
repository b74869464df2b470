"""Self-distillation of whole conversations: every question in order, after the backbone's own
answers to the ones before; and, where it is asked to, more questions that it thinks of itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.training.answerers import Answerer
from medusa_chat.training.conversations import Conversation
from medusa_chat.training.data import Example, encode_prompt, render
from medusa_chat.training.distill import Answer, DistillRecipe, answer_prompts

Messages = list[dict[str, str]]
QUESTION_TOKENS = 64
QUESTION_TEMPERATURE = 0.7  # questions may be various; the answers are what is learnt
MARK = "§next§"


@dataclass(frozen=True)
class Answered:
    """done of total questions are answered, in `tokens` tokens. total falls when a conversation
    ends before its last question. example: the last answer, with its conversation as prompt."""

    done: int
    total: int
    tokens: int
    example: Example | None = None


def answer_conversations(
    answerer: Answerer,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    recipe: DistillRecipe,
    length: int,
    folder: Path,
    self_talk: int = 0,
) -> Iterator[Answered]:
    """One event an answer. Each turn's answers are a file of the folder, written as they come, so
    that an interrupted run goes on. A conversation ends where its next prompt leaves no room for an
    answer within `length` tokens. self_talk: after its last question the backbone thinks of as many
    more itself (Medusa, arXiv 2401.10774, 2.3.2), as long as these come to an end of their own.
    Raises UsageError where no prompt fits."""
    folder.mkdir(parents=True, exist_ok=True)
    talks = {i: _start(found) for i, found in enumerate(conversations)}
    asked = {i: list(found.asked) for i, found in enumerate(conversations)}
    done, tokens = 0, 0
    for turn in range(max(map(len, asked.values()), default=0) + self_talk):
        silent = [
            i for i in talks if len(asked[i]) == turn < len(conversations[i].asked) + self_talk
        ]
        file = folder / f"questions-{turn + 1}.jsonl"
        for index, text in _own_questions(answerer, tokenizer, talks, silent, recipe, length, file):
            asked[index].append(text)
        prompts: dict[int, list[int]] = {}
        for index, talk in talks.items():
            ids = _next_prompt(tokenizer, talk, asked[index], turn, conversations[index].place)
            if ids and len(ids) + recipe.max_new_tokens <= length:
                prompts[index] = ids
        if not prompts:
            break
        left = sum(max(len(conversations[i].asked) + self_talk - turn, 1) for i in prompts)
        order = list(prompts)
        turns = replace(recipe, seed=recipe.seed + 100_003 * turn)
        answers = answer_prompts(
            answerer, list(prompts.values()), turns, folder / f"answers-{turn + 1}.jsonl"
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


def _own_questions(
    answerer: Answerer,
    tokenizer: Any,
    talks: Mapping[int, Messages],
    silent: Sequence[int],
    recipe: DistillRecipe,
    length: int,
    file: Path,
) -> Iterator[tuple[int, str]]:
    """The next question of each conversation that has none left, as the backbone writes on where
    the user's turn begins; those that are empty or have no end are left out."""
    begun = {i: _user_prompt(tokenizer, talks[i]) for i in silent}
    prompts = {i: ids for i, ids in begun.items() if ids and len(ids) + QUESTION_TOKENS <= length}
    if not prompts:
        return
    order = list(prompts)
    thinking = replace(recipe, max_new_tokens=QUESTION_TOKENS, temperatures=(QUESTION_TEMPERATURE,))
    for answer in answer_prompts(answerer, list(prompts.values()), thinking, file):
        text = tokenizer.decode(answer.answer_ids, skip_special_tokens=True).strip()
        if text and answer.answer_ids[-1] in answerer.ends:
            yield order[answer.index], text


def _user_prompt(tokenizer: Any, talk: Messages) -> list[int] | None:
    """Ids up to where the next message of the user begins; None where the template has no such
    place, as one that puts the text elsewhere."""
    text = render(tokenizer, [*talk, {"role": "user", "content": MARK}])
    before, mark, _ = text.partition(MARK)
    ids: list[int] = tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"]
    return ids if mark else None


def _next_prompt(
    tokenizer: Any, talk: Messages, asked: Sequence[str], turn: int, place: str
) -> list[int] | None:
    """Ids after the next question, which is put into the talk; None where there is none."""
    if turn >= len(asked):
        return None
    talk.append({"role": "user", "content": asked[turn]})
    try:
        return encode_prompt(tokenizer, talk)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _example(answer: Answer, found: Conversation) -> Example | None:
    """None for an answer too short to teach a head anything."""
    return replace(answer.example, place=found.place) if len(answer.answer_ids) > 2 else None
