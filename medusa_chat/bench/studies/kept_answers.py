"""KeptAnswers: the answers that a training keeps, from which the studies that train learn.

A backbone of a real vocabulary takes minutes for a few hundred answers. `medusa-chat train
--distill` keeps those it made in the folder `answers` of its working folder.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.hf_baseline import DTYPES, read_baseline
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads, half_precision
from medusa_chat.errors import UsageError
from medusa_chat.training.accuracy import ranks_in
from medusa_chat.training.data import Example, collate, group_by_length
from medusa_chat.training.distill import read_answers
from medusa_chat.training.loss import run_decoder
from medusa_chat.training.path_search import Answer
from medusa_chat.training.short_vocabulary import ShortVocabulary, shortlist

LEARNT, HELD_OUT = 400, 60  # answers
RANKS, BATCH = 10, 2048


@dataclass(frozen=True)
class KeptAnswers:
    """learnt, held_out: answers to learn from and to measure on, none in both."""

    context: BenchContext
    learnt: tuple[Example, ...]
    held_out: tuple[Example, ...]

    def backbone(self) -> Any:
        """A new copy of the backbone in transformers, in the precision of the loaded one."""
        return read_baseline(self.context, DTYPES[self.context.loaded.info.precision]).model

    def short(self, model: Any) -> ShortVocabulary:
        """The tokens that the heads learn and draft, as in a training; all where the answers are
        too few to tell."""
        head = LogitHead(model.get_output_embeddings(), model.config.get_text_config())
        vocabulary = int(model.config.get_text_config().vocab_size)
        listed = shortlist((example.labels for example in self.learnt), vocabulary)
        found = ShortVocabulary.of(listed or range(vocabulary), head)
        assert found is not None  # the LM head is not quantised
        return found


def is_kept(file: Path | None) -> bool:
    """Whether a file is one of kept answers, by its first line."""
    if file is None or not file.is_file():
        return False
    with file.open("rb") as stream:
        try:
            return "answer_ids" in json.loads(stream.readline())
        except (ValueError, TypeError):
            return False


def read_kept(context: BenchContext) -> KeptAnswers:
    """Some answers of --data, drawn with seed 0. Raises UsageError for fewer than four, and for a
    quantised backbone."""
    if context.loaded.info.precision not in DTYPES:
        raise UsageError("this study trains in fp32, bf16 or fp16: give one as --precision")
    assert context.data is not None
    found = [a.example for a in read_answers(context.data) if len(a.answer_ids) > 2]
    if len(found) < 4:
        raise UsageError(f"{context.data} holds {len(found)} answers: give at least four")
    random.Random(0).shuffle(found)
    held_out = min(HELD_OUT, len(found) // 2)
    return KeptAnswers(context, tuple(found[held_out : held_out + LEARNT]), tuple(found[:held_out]))


@torch.inference_mode()
def states_before(model: Any, examples: Sequence[Example]) -> list[tuple[Tensor, Example]]:
    """Of each example the hidden states [n, d] before its n labels, its last tokens."""
    found = []
    for group in group_by_length(examples, BATCH, seed=0):
        hidden = run_decoder(model, collate(group))
        for row, example in zip(hidden, group, strict=True):
            first = example.is_label.index(True)
            found.append((row[first - 1 : len(example.ids) - 1].clone(), example))
    return found


@torch.inference_mode()
def ranks_among(
    short: ShortVocabulary, heads: MedusaHeads, states: Sequence[tuple[Tensor, Example]]
) -> list[Answer]:
    """As accuracy.ranks_of_answer, for heads whose logits are of the tokens of `short`. states: see
    states_before."""
    found: list[Answer] = []
    for hidden, example in states:
        answer = torch.tensor(example.ids[-len(hidden) :], device=hidden.device)
        with half_precision(hidden):
            logits = heads(hidden, answer, short.lm_head)
        best = logits.topk(min(RANKS, logits.shape[-1]), dim=-1).indices.tolist()
        found.append(ranks_in(best, short.columns(answer).tolist()))  # IGNORED is no column
    return found
