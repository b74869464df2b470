"""The end of a training: the heads are measured, and the checkpoint is written."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from medusa_chat.checkpoints import weights
from medusa_chat.checkpoints.adapters import merge_adapter
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.accuracy import count_ranks, ranks_of_answer
from medusa_chat.training.answerers import answerer, require_ends
from medusa_chat.training.checkpoint_writer import (
    TREE_NODES,
    Calibrated,
    heads_config,
    model_card,
    write_adapter,
    write_checkpoint,
    write_heads,
    write_json,
)
from medusa_chat.training.conversations import Conversation
from medusa_chat.training.data import Example
from medusa_chat.training.distill import DistillRecipe
from medusa_chat.training.distill_conversations import answer_conversations
from medusa_chat.training.recipe import Recipe, TrainRequest
from medusa_chat.training.setup import TrainingSetup

CALIBRATION_TOKENS = 128


def calibrate_heads(
    setup: TrainingSetup,
    heads: MedusaHeads,
    conversations: list[Conversation],
    held_out: Sequence[Example],
    recipe: Recipe,
    work: Path,
) -> Calibrated:
    """Rank accuracies on greedy answers to the held-out rows' prompts, as decoding meets them, and
    the tree that these answers ask for; on the rows themselves where those are plain text or cannot
    be answered, with the tree of the accuracies' products."""
    places = {example.place for example in held_out}
    asked = [found for found in conversations if found.place in places and found.messages]
    shutil.rmtree(work / "calibration", ignore_errors=True)  # few, and by who is here now
    try:
        measured = _greedy_answers(setup, asked, work / "calibration")
        what = f"{len(measured)} greedy answers of the backbone to held-out prompts"
    except UsageError:  # no prompt fits, or the backbone has no end: no reason to lose the heads
        measured = []
    answers = measured
    if not measured:
        measured, what = list(held_out), f"{len(held_out)} held-out rows"
    ranks = min(10, int(setup.config.get_text_config().vocab_size))
    lm_head = setup.lm_head
    *_, counts = count_ranks(setup.model, heads, measured, ranks, lm_head=lm_head)
    foreseen = [ranks_of_answer(setup.model, heads, one, ranks, lm_head) for one in answers]
    if not any(row and row[0] is not None for answer in foreseen for row in answer):
        foreseen = []  # nothing was: no tree of answers, and no reason to lose the heads
    return Calibrated.search(counts.accuracies, TREE_NODES, what, counts.labels[0], foreseen)


def _greedy_answers(
    setup: TrainingSetup, asked: Sequence[Conversation], folder: Path
) -> list[Example]:
    greedy = DistillRecipe(
        max_new_tokens=min(CALIBRATION_TOKENS, setup.length // 2),
        temperatures=(0.0,),
        rows=16,
    )
    ends = require_ends(setup.model, setup.tokenizer)
    who = answerer(setup.model, setup.length, ends)
    events = answer_conversations(who, setup.tokenizer, asked, greedy, setup.length, folder)
    return [event.example for event in events if event.example is not None]


def write_output(
    request: TrainRequest,
    setup: TrainingSetup,
    heads: MedusaHeads,
    calibrated: Calibrated,
    tensors: dict[str, torch.Tensor],
    names: Sequence[str],
) -> int:
    recipe, output = request.recipe, request.output
    base = setup.base.seen_from(output)
    dtype = setup.model.dtype
    heads = heads.to(dtype).requires_grad_(False)
    is_merged = recipe.method == "medusa-2" and recipe.output == "merged"
    if is_merged:
        setup.model = None  # its memory is needed for the one that is merged into

    def fill(folder: Path) -> None:
        if is_merged:
            _merge(setup, folder, tensors, names, recipe, base)
        else:
            write_json(folder / "config.json", heads_config(heads, base))
            if tensors:
                write_adapter(folder, tensors, names, recipe, base)
        write_heads(folder, heads, calibrated)
        files = [path.name for path in request.data]
        card = model_card(setup.base, recipe, files, calibrated)
        (folder / "README.md").write_text(card, "utf-8")

    return write_checkpoint(output, fill)


def _merge(
    setup: TrainingSetup,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    names: Sequence[str],
    recipe: Recipe,
    base: str,
) -> None:
    """Write the whole model: the adapter goes into the weights as they were published, in 16 bit,
    also where it was learnt over quantised ones."""
    file = write_adapter(folder, tensors, names, recipe, base)
    precision = "bf16" if setup.precision in ("nf4", "int8") else setup.precision
    model = weights.read_model(setup.found, setup.config, precision, torch.device("cpu"))
    merge_adapter(model, file).save_pretrained(folder)
    setup.tokenizer.save_pretrained(folder)
    file.unlink()
    file.with_name("adapter_config.json").unlink()
