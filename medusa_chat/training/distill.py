"""Self-distillation: the backbone answers every question of conversations, and files keep it all.

It sees its own earlier answers, and can continue with questions of its own.
"""

import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.errors import ConversationRefused, UsageError
from medusa_chat.messages import Message
from medusa_chat.training.answerers import (
    BATCH_ROWS,
    Answerer,
    PromptBatch,
    answerer_of,
    batch_rows,
)
from medusa_chat.training.conversations import Conversation, left_out_line
from medusa_chat.training.events import Stage
from medusa_chat.training.examples import Example, encode_prompt, ids_of, render
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.setup import TrainingSetup

DONE = "answers.done"  # all answers are written: the other processes may read them
ANSWERS = "answers.jsonl"  # the conversations with their answers, as `train --data` reads them
QUESTION_TOKENS = 64
QUESTION_TEMPERATURE = 0.7  # varied questions; only the answers are learnt
TURN_SEED_STRIDE = 100_003  # between the seeds of two turns
MARK = "§next§"


@dataclass(frozen=True)
class DistillRecipe:
    """How prompts are answered. temperatures: batches take them in turn; 0 is greedy. rows: prompts
    per batch."""

    max_new_tokens: int = 96
    temperatures: tuple[float, ...] = (0.3, 0.0)
    rows: int = BATCH_ROWS
    seed: int = 0


@dataclass(frozen=True)
class Answered:
    """`done` of `total` questions are answered, in `tokens` tokens. total falls when a conversation
    ends before its last question. example: the last answer, with its conversation as the prompt;
    None where it is too short to train a head. said: the conversation up to that answer; place:
    where it comes from."""

    done: int
    total: int
    tokens: int
    example: Example | None = None
    said: tuple[Message, ...] = ()
    place: str = ""


@dataclass(frozen=True)
class Refused:
    """A conversation ends early, since the chat template does not accept what comes next."""

    place: str
    reason: str


# --------------------------------------------------------------------------- of a training


def distill(
    setup: TrainingSetup,
    conversations: list[Conversation],
    recipe: Recipe,
    folder: Path,
    group: ProcessGroup,
) -> Generator[Stage | Answered, None, list[Example]]:
    """The backbone's answers as examples; those in `folder` are not made again. The first process
    makes them and writes the conversations with their answers; the others wait for it."""
    settings = DistillRecipe(
        max_new_tokens=min(recipe.answer_tokens, setup.length // 2),
        temperatures=(recipe.temperature,),
        rows=batch_rows(setup),
        seed=recipe.seed,
    )
    questions = sum(len(one.asked) + recipe.self_talk for one in conversations)
    yield Stage(f"answering {questions:,} questions, at most {settings.max_new_tokens} tokens each")
    while not group.is_first and not (folder / DONE).exists():
        time.sleep(1.0)
    talks, examples = dict[str, Sequence[Message]](), list[Example]()
    refused = list[str]()
    for event in answer_conversations(
        answerer_of(setup),
        setup.tokenizer,
        conversations,
        settings,
        setup.length,
        folder / "answers",
        recipe.self_talk,
    ):
        if isinstance(event, Refused):
            refused.append(f"{event.place}: {event.reason}")
            continue
        talks[event.place] = event.said
        examples += [] if event.example is None else [event.example]
        yield event
    if refused:
        setup.notes.append(left_out_line(refused, f"{questions:,} questions and what follows them"))
    if group.is_first:
        rows = (json.dumps({"messages": talk}, ensure_ascii=False) for talk in talks.values())
        paths.write_text(folder / ANSWERS, "".join(f"{row}\n" for row in rows))
        (folder / DONE).touch()
    if not examples:
        raise UsageError(
            "the backbone's answers are too short to train heads on: give other prompts"
        )
    return examples


def keep_answers(folder: Path, output: Path) -> Path | None:
    """Move the answers of a finished training beside its output, under the first name that is free;
    None without any. They took most of its time, and another training can learn from them."""
    if not (folder / ANSWERS).is_file():
        return None
    names = chain([ANSWERS], (f"{number}.{ANSWERS}" for number in count(2)))
    places = (output.with_name(f"{output.name}.{name}") for name in names)
    free = next(place for place in places if not place.exists())
    (folder / ANSWERS).replace(free)
    return free


# ------------------------------------------------------------------------ whole conversations


@dataclass
class Dialogue:
    """A conversation while it is answered. messages: so far; questions: all, in order; limit: the
    number of questions with those that the backbone adds."""

    source: Conversation
    messages: list[Message]
    questions: list[str]
    limit: int


Prompted = tuple[Dialogue, list[int]]  # with the token ids of its next prompt


@dataclass(frozen=True)
class Distiller:
    """An answerer with what it needs to answer one turn of dialogues. length: most tokens of a
    prompt with its answer. folder: for each turn's answers, written as they come. refused: what the
    chat template did not accept."""

    answerer: Answerer
    tokenizer: Any
    recipe: DistillRecipe
    length: int
    folder: Path
    refused: list[Refused] = field(default_factory=list)

    def ask_questions(self, dialogues: Sequence[Dialogue], turn: int) -> None:
        """Let the backbone write the next question of the dialogues that have none left: it
        continues the text where the user's message begins (Medusa, arXiv 2401.10774, 2.3.2). Empty
        questions, and those without an end, are left out."""
        asking = [d for d in dialogues if len(d.questions) == turn < d.limit]
        fitting = self._fitting(asking, question_prompt, QUESTION_TOKENS)
        if not fitting:
            return
        recipe = replace(
            self.recipe, max_new_tokens=QUESTION_TOKENS, temperatures=(QUESTION_TEMPERATURE,)
        )
        file = self.folder / f"questions-{turn + 1}.jsonl"
        for answer in answer_prompts(self.answerer, [ids for _, ids in fitting], recipe, file):
            text = self._text(answer).strip()
            if text and answer.answer_ids[-1] in self.answerer.ends:
                fitting[answer.index][0].questions.append(text)

    def prompts(self, dialogues: Sequence[Dialogue], turn: int) -> list[Prompted]:
        """The dialogues that continue with question `turn`, and their prompts. The others have no
        question left, no space for an answer, or the chat template refuses it."""
        going = [d for d in dialogues if turn < len(d.questions)]
        for dialogue in going:
            dialogue.messages.append({"role": "user", "content": dialogue.questions[turn]})
        return self._fitting(going, encode_prompt, self.recipe.max_new_tokens)

    def answer(
        self, prompted: Sequence[Prompted], turn: int
    ) -> Iterator[tuple[Dialogue, "Answer"]]:
        """Answer the prompts and append the answers to their dialogues."""
        recipe = replace(self.recipe, seed=self.recipe.seed + TURN_SEED_STRIDE * turn)
        file = self.folder / f"answers-{turn + 1}.jsonl"
        for answer in answer_prompts(self.answerer, [ids for _, ids in prompted], recipe, file):
            dialogue, _ = prompted[answer.index]
            dialogue.messages.append({"role": "assistant", "content": self._text(answer)})
            yield dialogue, answer

    def _fitting(
        self,
        dialogues: Sequence[Dialogue],
        prompt_of: Callable[[Any, Sequence[Message]], list[int] | None],
        most: int,
    ) -> list[Prompted]:
        """The dialogues whose prompt the chat template accepts and which leaves space for `most`
        tokens, with its ids."""
        fitting = list[Prompted]()
        for dialogue in dialogues:
            place = dialogue.source.place
            try:
                ids = prompt_of(self.tokenizer, dialogue.messages)
            except ConversationRefused as error:
                self.refused.append(Refused(place, str(error)))
                continue
            except UsageError as error:
                raise UsageError(f"{place}: {error}") from error
            if ids and len(ids) + most <= self.length:
                fitting.append((dialogue, ids))
        return fitting

    def _text(self, answer: "Answer") -> str:
        return str(self.tokenizer.decode(answer.answer_ids, skip_special_tokens=True))


def answer_conversations(
    answerer: Answerer,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    recipe: DistillRecipe,
    length: int,
    folder: Path,
    self_talk: int = 0,
) -> Iterator[Answered | Refused]:
    """An event per answer, turn by turn, and one for each conversation that the chat template ends
    early. Answers in the folder's files are not made again, so that an interrupted run continues. A
    conversation ends where its next prompt leaves no space for an answer within `length` tokens.
    self_talk: number of questions that the backbone adds after the last one (Medusa, arXiv
    2401.10774, 2.3.2). Raises UsageError where no prompt fits."""
    folder.mkdir(parents=True, exist_ok=True)
    distiller = Distiller(answerer, tokenizer, recipe, length, folder)
    dialogues = [
        Dialogue(one, one.system_messages, list(one.asked), len(one.asked) + self_talk)
        for one in conversations
    ]
    done, tokens, told = 0, 0, 0
    for turn in range(max((dialogue.limit for dialogue in dialogues), default=0)):
        distiller.ask_questions(dialogues, turn)
        prompted = distiller.prompts(dialogues, turn)
        yield from distiller.refused[told:]
        told = len(distiller.refused)
        if not prompted:
            break
        dialogues = [dialogue for dialogue, _ in prompted]
        total = done + sum(max(dialogue.limit - turn, 1) for dialogue in dialogues)
        for dialogue, answer in distiller.answer(prompted, turn):
            done, tokens = done + 1, tokens + len(answer.answer_ids)
            place = dialogue.source.place
            example = answer.example(place) if len(answer.answer_ids) > 2 else None
            yield Answered(done, total, tokens, example, tuple(dialogue.messages), place)
    if not done and distiller.refused:
        first = distiller.refused[0]
        raise UsageError(f"{first.place}: {first.reason}")
    if not done:
        raise UsageError(
            f"no prompt leaves space for an answer within {length} tokens: raise --sequence-length"
        )


def question_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int] | None:
    """Ids up to the text of the user's next message; None for a template that does not write that
    text unchanged."""
    text = render(tokenizer, [*messages, {"role": "user", "content": MARK}])
    before, mark, _ = text.partition(MARK)
    return ids_of(tokenizer, before) if mark else None


# ------------------------------------------------------------------------ the file of answers


@dataclass(frozen=True)
class Answer:
    """An answer as token ids, with its end token. index: of the prompt. by: the answerer's name."""

    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    temperature: float
    by: str

    def example(self, place: str) -> Example:
        """The prompt and the answer, whose tokens are the labels."""
        is_label = (False,) * len(self.prompt_ids) + (True,) * len(self.answer_ids)
        return Example(self.prompt_ids + self.answer_ids, is_label, place)


def answer_prompts(
    answerer: Answerer, prompts: Sequence[Sequence[int]], recipe: DistillRecipe, path: Path
) -> Iterator[Answer]:
    """Answer every prompt (token ids); each answer is appended to the JSONL file at `path`.

    Answers in the file come first and are not made again: the same prompts and recipe give the same
    file, interrupted or not. Raises UsageError for the file of other prompts or of another
    answerer.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    batches: list[PromptBatch] = []  # of similar lengths
    for start in range(0, len(order), recipe.rows):
        chosen = [prompts[index] for index in order[start : start + recipe.rows]]
        temperature = recipe.temperatures[len(batches) % len(recipe.temperatures)]
        batches.append(PromptBatch(chosen, temperature, recipe.seed + len(batches)))
    earlier = _earlier_answers(path, order, prompts)
    yield from earlier
    if len(earlier) == len(prompts):
        return
    if earlier and earlier[0].by != answerer.name:
        raise UsageError(
            f"{path} was written by {earlier[0].by}, and {answerer.name} samples differently: "
            "remove it, or continue with the version and on the machine that wrote it"
        )
    answers = answerer.answer(batches, recipe.max_new_tokens, len(earlier))
    with path.open("a", encoding="utf-8") as file:
        for place, ids in zip(range(len(earlier), len(order)), answers, strict=True):
            index, temperature = order[place], batches[place // recipe.rows].temperature
            answer = Answer(index, tuple(prompts[index]), tuple(ids), temperature, answerer.name)
            file.write(json.dumps(asdict(answer)) + "\n")
            file.flush()
            yield answer


def read_answers(path: Path) -> Iterator[Answer]:
    """The answers of a file, up to an incomplete line."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            return
        prompt, answer = tuple(row["prompt_ids"]), tuple(row["answer_ids"])
        yield Answer(row["index"], prompt, answer, row["temperature"], row["by"])


def _earlier_answers(
    path: Path, order: Sequence[int], prompts: Sequence[Sequence[int]]
) -> list[Answer]:
    """The answers in the file, which is truncated after them: the last line is incomplete where the
    disk was full or the program was killed. order: of the prompts' indices. Raises UsageError."""
    if not path.exists():
        return []
    answers = list(read_answers(path))
    wanted = [(index, tuple(prompts[index])) for index in order[: len(answers)]]
    if [(answer.index, answer.prompt_ids) for answer in answers] != wanted:
        raise UsageError(f"{path} contains the answers to other prompts: remove it")
    lines = path.read_bytes().splitlines(keepends=True)
    if lines[len(answers) :]:
        paths.write_bytes(path, b"".join(lines[: len(answers)]))
    return answers
