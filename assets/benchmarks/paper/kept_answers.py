"""KeptAnswers: the answers that a training keeps, from which the studies that train learn.

A backbone of a real vocabulary takes minutes for a few hundred answers. `medusa-chat train
--distill` leaves those it made beside its output, in DIR.answers.jsonl.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from paper_context import PaperContext
from torch import Tensor

from medusa_chat import paths
from medusa_chat.bench.hf_baseline import DTYPES, read_baseline
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads, half_precision
from medusa_chat.errors import UsageError
from medusa_chat.training.calibration import RANKS, ranks_in
from medusa_chat.training.conversations import read_conversations
from medusa_chat.training.examples import Example, collate, encode_all, group_by_length
from medusa_chat.training.loss import ShortVocabulary, run_decoder, shortlist
from medusa_chat.trees.calibration import AnswerRanks, search_paths, tokens_per_step

LEARNT, HELD_OUT = 400, 60  # answers
BATCH, NODES = 2048, 16
LENGTH = 512  # tokens of an example at most


@dataclass(frozen=True)
class KeptAnswers:
    """learnt, held_out: answers to learn from and to measure on, none in both."""

    context: PaperContext
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


def read_kept(context: PaperContext) -> KeptAnswers:
    """Some answers of --data, or of our own conversations, drawn with seed 0. Raises UsageError for
    fewer than four, and for a quantised backbone."""
    if context.loaded.info.precision not in DTYPES:
        raise UsageError("this study trains in fp32, bf16 or fp16: give one as --precision")
    file = context.data or paths.asset("benchmarks", "conversations.jsonl")
    if not file.is_file():
        raise UsageError("there are no answers to learn from: give --data FILE, as for train")
    backbone = context.loaded.engine.backbone
    length = min(LENGTH, backbone.context)
    read = read_conversations(file)
    encoded = encode_all(context.loaded.tokenizer, read.conversations, length, backbone.vocabulary)
    for note in (*read.notes, *encoded.notes):
        context.progress(note)
    found = [one for one in map(last_answer, encoded.examples) if one is not None]
    if len(found) < 4:
        raise UsageError(f"{file} holds {len(found)} answers: give at least four")
    random.Random(0).shuffle(found)
    held_out = min(HELD_OUT, len(found) // 2)
    return KeptAnswers(context, tuple(found[held_out : held_out + LEARNT]), tuple(found[:held_out]))


def last_answer(one: Example) -> Example | None:
    """The example up to its last label, with the last answer's tokens alone as labels; None where
    these are too few to train on, or there is no prompt before them."""
    end = max(at for at, is_label in enumerate(one.is_label) if is_label) + 1
    start = max((at for at in range(end) if not one.is_label[at]), default=-1) + 1
    if not start or end - start < 3:
        return None
    return Example(one.ids[:end], (False,) * start + (True,) * (end - start), one.place)


def held_out_tokens_per_step(ranks: Sequence[AnswerRanks], heads: int) -> float:
    """Tokens a step of the first `heads` heads with a tree of NODES nodes. The tree is searched on
    every second answer and measured on the others."""
    cut = [[row[:heads] for row in answer] for answer in ranks]
    tree = search_paths(cut[::2], NODES, NODES)
    return tokens_per_step(cut[1::2], tree)


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
) -> list[AnswerRanks]:
    """As accuracy.ranks_of, for heads whose logits are of the tokens of `short`. states: see
    states_before."""
    found: list[AnswerRanks] = []
    for hidden, example in states:
        answer = torch.tensor(example.ids[-len(hidden) :], device=hidden.device)
        with half_precision(hidden):
            logits = heads(hidden, answer, short.lm_head)
        best = logits.topk(min(RANKS, logits.shape[-1]), dim=-1).indices.tolist()
        found.append(ranks_in(best, short.columns(answer).tolist()))  # IGNORED is no column
    return found
