"""Self-distillation in a training: the backbone answers the prompts, and the answers are kept."""

import json
import time
from collections.abc import Generator, Sequence
from itertools import chain, count
from pathlib import Path

from medusa_chat import paths
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message
from medusa_chat.training.answerers import DistillRecipe, answerer_of, batch_rows
from medusa_chat.training.conversations import Conversation, left_out_line
from medusa_chat.training.data import Example
from medusa_chat.training.distill_conversations import Answered, Refused, answer_conversations
from medusa_chat.training.events import Stage
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.setup import TrainingSetup

DONE = "answers.done"  # all answers are there: the other processes may read them
ANSWERS = "answers.jsonl"  # the conversations with their answers, as `train --data` reads them


def distill(
    setup: TrainingSetup,
    conversations: list[Conversation],
    recipe: Recipe,
    folder: Path,
    group: ProcessGroup,
) -> Generator[Stage | Answered, None, list[Example]]:
    """The backbone's answers as examples; those that `folder` holds are not made again. The first
    process makes them and writes the conversations with their answers; the others wait for it."""
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
    kept = next(place for place in places if not place.exists())
    (folder / ANSWERS).replace(kept)
    return kept
