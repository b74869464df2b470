"""The stage of a training in which the backbone answers the prompts (self-distillation)."""

import json
import time
from collections.abc import Generator, Sequence
from itertools import chain, count
from pathlib import Path

from medusa_chat import paths
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message
from medusa_chat.training.answerers import answerer_of, rows_of
from medusa_chat.training.conversations import Conversation, left_out_line
from medusa_chat.training.data import Example
from medusa_chat.training.distill import DistillRecipe
from medusa_chat.training.distill_conversations import Answered, Refused, answer_conversations
from medusa_chat.training.events import Stage
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.setup import TrainingSetup

ANSWERS_DONE = "answers.done"
KEPT = "answers.jsonl"  # the conversations with their answers, as `train --data` reads them


def keep_answers(folder: Path, output: Path) -> Path | None:
    """Move the answers of a training that is done beside its output, by the first name that is
    free; None without any. They are the dearest part of it, and another training can learn from
    them."""
    if not (folder / KEPT).is_file():
        return None
    names = chain([KEPT], (f"{number}.{KEPT}" for number in count(2)))
    places = (output.with_name(f"{output.name}.{name}") for name in names)
    kept = next(place for place in places if not place.exists())
    (folder / KEPT).replace(kept)
    return kept


def distill(
    setup: TrainingSetup,
    conversations: list[Conversation],
    recipe: Recipe,
    folder: Path,
    group: ProcessGroup,
) -> Generator[Stage | Answered, None, list[Example]]:
    """What the heads learn: the backbone's answers, read from their files below `folder` as far as
    they are there. The first process makes them and writes the conversations with them; the others
    wait until it is done."""
    settings = DistillRecipe(
        max_new_tokens=min(recipe.answer_tokens, setup.length // 2),
        temperatures=(recipe.temperature,),
        rows=rows_of(setup),
        seed=recipe.seed,
    )
    questions = sum(len(found.asked) + recipe.self_talk for found in conversations)
    most = settings.max_new_tokens
    yield Stage(f"answering {questions:,} questions, at most {most} tokens each")
    while not group.is_first and not (folder / ANSWERS_DONE).exists():
        time.sleep(1.0)
    said, found, refused = dict[str, Sequence[Message]](), list[Example](), list[str]()
    given = setup.tokenizer, conversations, settings, setup.length, folder / "answers"
    for event in answer_conversations(answerer_of(setup), *given, recipe.self_talk):
        if isinstance(event, Refused):
            refused.append(f"{event.place}: {event.reason}")
            continue
        said[event.place] = event.said
        found += [] if event.example is None else [event.example]
        yield event
    if refused:
        setup.notes.append(left_out_line(refused, f"{questions:,} questions and what follows them"))
    if group.is_first:
        rows = (json.dumps({"messages": told}, ensure_ascii=False) for told in said.values())
        paths.write_text(folder / KEPT, "".join(f"{row}\n" for row in rows))
        (folder / ANSWERS_DONE).touch()
    if not found:
        raise UsageError(
            "the backbone's answers are too short to train heads on: give other prompts"
        )
    return found
