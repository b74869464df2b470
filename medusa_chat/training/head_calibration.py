"""The calibration of new heads: rank accuracies on held-out prompts, and the tree they ask for."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.accuracy import accuracies_of, ranks_of
from medusa_chat.training.answerers import answerer_of, rows_of
from medusa_chat.training.checkpoint_writer import TREE_NODES, Calibrated
from medusa_chat.training.conversations import Conversation
from medusa_chat.training.data import Example
from medusa_chat.training.distill import DistillRecipe
from medusa_chat.training.distill_conversations import Answered, answer_conversations
from medusa_chat.training.setup import TrainingSetup

CALIBRATION_TOKENS = 128  # of an answer


def calibrate_heads(
    setup: TrainingSetup,
    heads: MedusaHeads,
    conversations: Sequence[Conversation],
    held_out: Sequence[Example],
    folder: Path,
    listed: Sequence[int] = (),
) -> Calibrated:
    """Measure the heads on greedy answers to the held-out prompts, as decoding uses them, and
    search the tree for these answers. Where the held-out data is plain text or cannot be answered,
    the examples themselves are measured, and the tree follows from the products of the accuracies
    (Medusa, arXiv 2401.10774, 2.3.3). The answers are written below `folder`. listed: the tokens
    that are drafted, where not all are."""
    answers = _held_out_answers(setup, conversations, held_out, folder / "calibration")
    measured = answers or list(held_out)
    source = "greedy answers of the backbone to held-out prompts" if answers else "held-out rows"
    found = [rows for one in measured for rows in ranks_of(setup.model, heads, one, listed)]
    accuracies, labels = accuracies_of(found, len(heads))
    if not answers or not any(row and row[0] is not None for rows in found for row in rows):
        found = []  # no greedy answers, or no token was predicted: the accuracies give a tree
    what = f"{len(measured)} {source}"
    return Calibrated.search(accuracies, TREE_NODES, what, labels[0], found)


def _held_out_answers(
    setup: TrainingSetup,
    conversations: Sequence[Conversation],
    held_out: Sequence[Example],
    folder: Path,
) -> list[Example]:
    """Greedy answers to the held-out conversations. None where no prompt fits or the backbone has
    no end token: a training of hours must not fail for that."""
    places = {example.place for example in held_out}
    prompts = [found for found in conversations if found.place in places and found.messages]
    greedy = DistillRecipe(
        max_new_tokens=min(CALIBRATION_TOKENS, setup.length // 2),
        temperatures=(0.0,),
        rows=rows_of(setup),
    )
    shutil.rmtree(folder, ignore_errors=True)  # a resumed training may answer in another way
    try:
        answerer = answerer_of(setup)
        events = answer_conversations(
            answerer, setup.tokenizer, prompts, greedy, setup.length, folder
        )
        answered = (event for event in events if isinstance(event, Answered))
        return [event.example for event in answered if event.example is not None]
    except UsageError:
        return []
