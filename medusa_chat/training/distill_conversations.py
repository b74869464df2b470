"""Self-distillation of whole conversations: the backbone answers every question in order.

It sees its own earlier answers, and, if wanted, continues with questions of its own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa_chat.errors import ConversationRefused, UsageError
from medusa_chat.messages import Message
from medusa_chat.training.answerers import Answer, Answerer, DistillRecipe, answer_prompts
from medusa_chat.training.conversations import Conversation
from medusa_chat.training.data import Example, encode_prompt, render

QUESTION_TOKENS = 64
QUESTION_TEMPERATURE = 0.7  # varied questions; only the answers are learnt
TURN_SEED_STRIDE = 100_003  # between the seeds of two turns
MARK = "§next§"


@dataclass(frozen=True)
class Answered:
    """done of total questions are answered, in `tokens` tokens. total falls when a conversation
    ends before its last question. example: the last answer, with its conversation as the prompt;
    None where it is too short to train a head. said: the conversation up to that answer; place:
    where it is from."""

    done: int
    total: int
    tokens: int
    example: Example | None = None
    said: tuple[Message, ...] = ()
    place: str = ""


@dataclass(frozen=True)
class Refused:
    """A conversation ends early, since the chat template does not take what would come next."""

    place: str
    reason: str


@dataclass
class Dialogue:
    """A conversation while it is answered. messages: so far; questions: all, in order; limit: the
    number of questions with those that the backbone adds."""

    source: Conversation
    messages: list[dict[str, str]]
    questions: list[str]
    limit: int


Prompted = tuple[Dialogue, list[int]]  # and the token ids that it asks with


@dataclass(frozen=True)
class Distiller:
    """The answerer with what it needs to answer a dialogue's turn. length: most tokens of a prompt
    with its answer. folder: where every turn's answers are written as they come. refused: what the
    chat template did not take."""

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
        starts = [(d, self._start(question_prompt, d)) for d in asking]
        fitting = self._fitting(starts, QUESTION_TOKENS)
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
        starts = [(d, self._start(encode_prompt, d)) for d in going]
        return self._fitting(starts, self.recipe.max_new_tokens)

    def answer(self, prompted: Sequence[Prompted], turn: int) -> Iterator[tuple[Dialogue, Answer]]:
        """Answer the prompts and append the answers to their dialogues."""
        recipe = replace(self.recipe, seed=self.recipe.seed + TURN_SEED_STRIDE * turn)
        file = self.folder / f"answers-{turn + 1}.jsonl"
        for answer in answer_prompts(self.answerer, [ids for _, ids in prompted], recipe, file):
            dialogue, _ = prompted[answer.index]
            dialogue.messages.append({"role": "assistant", "content": self._text(answer)})
            yield dialogue, answer

    def _start(
        self,
        prompt_of: Callable[[Any, Sequence[Message]], list[int] | None],
        dialogue: Dialogue,
    ) -> list[int] | None:
        """The ids of a dialogue's prompt; None where the chat template refuses it."""
        place = dialogue.source.place
        try:
            return prompt_of(self.tokenizer, dialogue.messages)
        except ConversationRefused as error:
            self.refused.append(Refused(place, str(error)))
            return None
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error

    def _fitting(
        self, starts: Sequence[tuple[Dialogue, list[int] | None]], most: int
    ) -> list[Prompted]:
        """The prompts that leave space for `most` tokens."""
        return [(d, ids) for d, ids in starts if ids and len(ids) + most <= self.length]

    def _text(self, answer: Answer) -> str:
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
    """One event an answer, turn by turn, and one for each conversation that the chat template ends
    early. Answers that are in the folder's files are not made again, so that an interrupted run
    continues. A conversation ends where its next prompt leaves no space for an answer within
    `length` tokens. self_talk: number of questions that the backbone adds after the last one
    (Medusa, arXiv 2401.10774, 2.3.2). Raises UsageError where no prompt fits."""
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
            example = replace(answer.example, place=place) if len(answer.answer_ids) > 2 else None
            yield Answered(done, total, tokens, example, tuple(dialogue.messages), place)
    if not done and distiller.refused:
        first = distiller.refused[0]
        raise UsageError(f"{first.place}: {first.reason}")
    if not done:
        raise UsageError(
            f"no prompt leaves space for an answer within {length} tokens: raise --sequence-length"
        )


def question_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int] | None:
    """Ids up to the text of the user's next message; None for a template that does not write that
    text as it is."""
    text = render(tokenizer, [*messages, {"role": "user", "content": MARK}])
    before, mark, _ = text.partition(MARK)
    ids: list[int] = tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"]
    return ids if mark else None
