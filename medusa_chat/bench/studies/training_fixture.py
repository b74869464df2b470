"""TrainingFixture: the published backbone and conversations for the studies that train.

Made for models of a few million parameters on a CPU: each training takes a minute or less.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_chat import paths
from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.hf_baseline import read_baseline
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message
from medusa_chat.training.accuracy import ranks_of_answer
from medusa_chat.training.answerers import fastest_answerer, require_ends
from medusa_chat.training.conversations import Conversation, read_conversations
from medusa_chat.training.data import Example, collate, encode, encode_prompt, group_by_length
from medusa_chat.training.distill import DistillRecipe, answer_prompts
from medusa_chat.training.examples import encode_all
from medusa_chat.training.loss import IGNORED, run_decoder
from medusa_chat.training.path_search import Answer, search_paths, tokens_per_step
from medusa_chat.training.teacher_states import next_tokens
from medusa_chat.units import number

MOST_PARAMETERS = 300_000_000
HELD_OUT = 120  # conversations at the end of the file; half find the tree, half measure it
LENGTH = 256  # tokens of an example at most
ANSWER_TOKENS = 96
NODES = 16
BATCH = 2048
Messages = list[Message]


@dataclass(frozen=True)
class TrainingFixture:
    """learnt, held_out: conversations to train on and to measure on. folder: of temporary files."""

    context: BenchContext
    learnt: tuple[Conversation, ...]
    held_out: tuple[Conversation, ...]
    folder: Path

    def backbone(self) -> Any:
        """A new copy of the backbone in fp32."""
        return read_baseline(self.context, "float32").model

    def examples(self, conversations: Sequence[Conversation]) -> list[Example]:
        """The conversations of the data as examples; the assistant's tokens are the labels."""
        backbone = self.context.loaded.engine.backbone
        length = min(LENGTH, backbone.context)
        return list(
            encode_all(self._tokenizer, conversations, length, backbone.vocabulary).examples
        )

    def given(self, prompts_and_answers: Sequence[Messages]) -> list[Example]:
        """Examples with the last message of the data as the answer and the rest as the prompt."""
        made = []
        for conversation in self._fitting(prompts_and_answers):
            first = len(encode_prompt(self._tokenizer, conversation[:-1]))
            ids, is_label = encode(self._tokenizer, conversation)
            made.append(Example(tuple(ids), (False,) * first + tuple(is_label[first:])))
        return made

    def answers(
        self,
        model: Any,
        prompts_and_answers: Sequence[Messages],
        temperatures: tuple[float, ...],
        name: str,
    ) -> list[Example]:
        """Examples with the model's own answer in place of the last message; answers of two tokens
        are left out."""
        prompts = [
            encode_prompt(self._tokenizer, conversation[:-1])
            for conversation in self._fitting(prompts_and_answers)
        ]
        recipe = DistillRecipe(ANSWER_TOKENS, temperatures)
        made = []
        length = self.context.loaded.engine.backbone.context
        respondent = fastest_answerer(model, length, require_ends(model, self._tokenizer))
        answers = answer_prompts(respondent, prompts, recipe, self.folder / f"{name}.jsonl")
        for place, answer in enumerate(answers):
            if place % 64 == 0:
                self.context.progress(f"answers: {place} of {len(prompts)}")
            if len(answer.answer_ids) > 2:
                made.append(answer.example)
        if not made:
            raise UsageError("the backbone's answers are too short to train on: give other --data")
        return made

    def _fitting(self, prompts_and_answers: Sequence[Messages]) -> list[Messages]:
        room = self.context.loaded.engine.backbone.context - ANSWER_TOKENS
        return [
            t for t in prompts_and_answers if len(encode_prompt(self._tokenizer, t[:-1])) <= room
        ]

    @property
    def _tokenizer(self) -> Any:
        return self.context.loaded.tokenizer


def make_fixture(context: BenchContext, folder: Path) -> TrainingFixture:
    """The conversations of --data, or our own. Raises UsageError for a model too large to train in
    minutes, and for a file with too few conversations."""
    if context.loaded.info.parameters > MOST_PARAMETERS:
        raise UsageError(
            f"the backbone has {number(context.loaded.info.parameters)} parameters, and this study "
            f"takes at most {number(MOST_PARAMETERS)}: use medusa-chat train"
        )
    file = context.data or paths.asset("benchmarks", "conversations.jsonl")
    if not file.is_file():
        raise UsageError("there are no conversations to train on: give --data FILE, as for train")
    found = [one for one in read_conversations(file) if one.messages]
    held_out = min(HELD_OUT, len(found) // 3)
    if held_out < 2:
        raise UsageError(f"{file} holds {len(found)} conversations: give at least six")
    return TrainingFixture(context, tuple(found[:-held_out]), tuple(found[-held_out:]), folder)


def prompted_messages(conversations: Sequence[Conversation], each: int = 1) -> list[Messages]:
    """`each` beginnings of every conversation that end with a message of the assistant, drawn with
    seed 0."""
    generator = random.Random(0)
    found: list[Messages] = []
    for one in conversations:
        turns = [i for i, m in enumerate(one.messages) if m["role"] == "assistant" and i]
        chosen = generator.sample(turns, min(each, len(turns)))
        found += [list(one.messages[: turn + 1]) for turn in chosen]
    return found


def ranks_of(model: Any, heads: MedusaHeads, answers: Sequence[Example]) -> list[Answer]:
    """For each answer the ranks that the heads gave to its tokens."""
    ranks = min(10, int(model.config.get_text_config().vocab_size))
    return [ranks_of_answer(model, heads, example, ranks) for example in answers]


def held_out_tokens_per_step(ranks: Sequence[Answer], heads: int) -> float:
    """Tokens a step of the first `heads` heads with a tree of NODES nodes. The tree is searched on
    every second answer and measured on the others."""
    cut = [[row[:heads] for row in answer] for answer in ranks]
    tree = search_paths(cut[::2], NODES, NODES)
    return tokens_per_step(cut[1::2], tree)


@torch.no_grad()
def held_out_loss(model: Any, examples: Sequence[Example]) -> float:
    """Mean cross-entropy of the backbone over the labels, in nats a token."""
    lm_head = LogitHead(model.get_output_embeddings(), model.config.get_text_config())
    total, count = 0.0, 0
    for group in group_by_length(examples, BATCH, seed=0):
        batch = collate(group)
        wanted: Tensor = next_tokens(batch).to(model.device)
        chosen = wanted != IGNORED
        logits = lm_head(run_decoder(model, batch)[chosen]).float()
        total += float(F.cross_entropy(logits, wanted[chosen], reduction="sum"))
        count += int(chosen.sum())
    return total / count
