"""`medusa-chat calibrate`: rank accuracies on the backbone's own answers, and their best tree.

The answers are greedy. What is written also says the tokens a step that the tree really gives."""

import json
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from medusa_chat import paths
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.events import Finished, Told
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ContextError, MedusaChatError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.training.accuracy import counts_of, ranks_after, states_of
from medusa_chat.training.checkpoint_writer import Calibrated
from medusa_chat.training.conversations import Conversation, read_conversations
from medusa_chat.training.data import encode_prompt
from medusa_chat.training.distill_conversations import Answered
from medusa_chat.training.events import Stage, Written
from medusa_chat.training.examples import require_template
from medusa_chat.training.path_search import Answer as AnswerRanks
from medusa_chat.training.short_vocabulary import shortlist

MOST_CONVERSATIONS = 256
ANSWER_TOKENS = 128
MEASURED_PROMPTS = 8
RANKS = 10


@dataclass(frozen=True)
class Measured:
    """(nodes, tokens a step expected, tokens a step measured) of the tree cut to each size."""

    sizes: tuple[tuple[int, float, float], ...]


class RankCounter:
    """The heads' predictions over the greedy answers so far. prompts: token ids of each; said:
    those of each answer; answers: the rank of every token of it, for the search of the tree."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._engine = loaded.engine
        self.ranks = min(RANKS, loaded.engine.backbone.vocabulary)
        self.prompts: list[list[int]] = []
        self.said: list[list[int]] = []
        self.answers: list[AnswerRanks] = []

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Count one answer to a prompt, both token ids."""
        self.prompts.append(prompt)
        self.said.append(answer)
        heads, backbone = self._engine.heads, self._engine.backbone
        assert heads is not None
        hidden = states_of(self._engine, torch.tensor(prompt + answer, device=backbone.device))
        before = hidden[len(prompt) - 1 : -1]
        listed = [] if heads.shortlist is None else heads.shortlist.tolist()
        found = ranks_after(before, answer, heads, backbone.lm_head, self.ranks, listed)
        self.answers.append(found)

    @property
    def tokens(self) -> int:
        """How many tokens all answers have."""
        return sum(map(len, self.said))


def calibrate(
    request: LoadRequest,
    data: Sequence[Path],
    nodes: int,
    output: Path,
    chats: Sequence[Conversation] = (),
) -> Iterator[Stage | Answered | Calibrated | Measured | Written]:
    """Measure the heads on greedy answers to the prompts, search the tree of at most `nodes` nodes,
    measure its tokens a step and write `output`. chats: the user's own, asked again beside the
    data. Raises MedusaChatError."""
    conversations = _choose(data, chats)
    yield Stage("loading")
    loaded = yield from _load(request)
    require_template(loaded.tokenizer, conversations)
    yield Stage("answers")
    counter = RankCounter(loaded)
    total = sum(len(one.asked) for one in conversations)
    for prompt, answer in _answers(loaded, conversations):
        counter.add(prompt, answer)
        done = len(counter.prompts)
        yield Answered(done, max(total, done), counter.tokens)
    calibrated = _search(loaded, counter, nodes, _sources(data, chats))
    yield calibrated
    yield Stage("measuring")
    yield Measured(_measured(loaded, calibrated, counter.prompts[:MEASURED_PROMPTS]))
    yield _write(calibrated, output)


def _choose(data: Sequence[Path], chats: Sequence[Conversation]) -> list[Conversation]:
    """At most MOST_CONVERSATIONS, drawn with seed 0. Raises UsageError without any."""
    found = [*chats, *(one for path in data for one in read_conversations(path, prompts=True))]
    if not found:
        raise UsageError(f"{', '.join(map(str, data))} holds no prompt: give other --data")
    return random.Random(0).sample(found, min(len(found), MOST_CONVERSATIONS))


def _load(request: LoadRequest) -> Generator[Stage, None, LoadedModel]:
    told, loaded = "", None
    for phase, model in load(request):
        loaded = model
        if phase.note not in ("", told):
            told = phase.note
            yield Stage(told)
    assert loaded is not None
    if not loaded.info.heads:
        raise UsageError(f"{loaded.info.name} has no Medusa heads: train heads first")
    return loaded


def _sources(data: Sequence[Path], chats: Sequence[Conversation]) -> str:
    return ", ".join([*(["the user's own chats"] if chats else []), *(path.name for path in data)])


def _search(loaded: LoadedModel, counter: RankCounter, nodes: int, sources: str) -> Calibrated:
    """The calibration with the best tree, and with the checkpoint's shortlist, or a first one where
    the answers are enough for it."""
    counts = counts_of(counter.answers, loaded.info.heads, counter.ranks)
    if not any(counts.labels):
        raise UsageError("the answers are too short to measure the heads on: give other prompts")
    measured_on = f"{len(counter.prompts)} greedy answers of the backbone to {sources}"
    found = Calibrated.search(
        counts.accuracies, nodes, measured_on, counts.labels[0], counter.answers
    )
    kept = loaded.calibration.shortlist if loaded.calibration is not None else ()
    vocabulary = loaded.engine.backbone.vocabulary
    return replace(found, shortlist=kept or shortlist(counter.said, vocabulary))


def _write(calibrated: Calibrated, output: Path) -> Written:
    try:
        paths.write_text(output, json.dumps(calibrated.to_json()) + "\n")
    except OSError as error:
        raise MedusaChatError(f"{output} cannot be written: {error.strerror}") from error
    return Written(str(output), output.stat().st_size)


def _answers(
    loaded: LoadedModel, conversations: Sequence[Conversation]
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of every question, each conversation's in order. A conversation ends
    where its next prompt does not fit into the context."""
    tree, _ = loaded.auto_tree()  # not the whole: on a CPU its nodes cost more than they bring
    for conversation in conversations:
        messages = conversation.system_messages
        for text in conversation.asked:
            messages.append({"role": "user", "content": text})
            prompt = encode_prompt(loaded.tokenizer, messages)
            try:
                answer = _finished(_generate(loaded, prompt, tree)).token_ids
            except ContextError:
                break
            yield prompt, list(answer)
            reply = loaded.tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": reply})


def _generate(loaded: LoadedModel, prompt: list[int], tree: Tree) -> Iterator[Told]:
    """A greedy answer with exact acceptance, so the backbone's own."""
    engine = loaded.engine
    settings = GenerationSettings(
        drafter="medusa", max_new_tokens=ANSWER_TOKENS, nodes=len(tree), seed=0
    )
    drafter = engine.drafter(settings, tree.pruned(loaded.info.heads), details=False)
    return engine.generate(prompt, drafter, settings, details=False)


def _finished(events: Iterator[Told]) -> Finished:
    *_, last = events
    assert isinstance(last, Finished)
    return last


def _measured(
    loaded: LoadedModel, calibrated: Calibrated, prompts: list[list[int]]
) -> tuple[tuple[int, float, float], ...]:
    """(nodes, expected, measured) for every size of the tree at which an answer has a step."""
    sizes: list[tuple[int, float, float]] = []
    for nodes, expected in calibrated.expected.items():
        if nodes == 1:
            continue
        tree, steps, tokens = calibrated.tree.head(nodes), 0, 0
        for prompt in prompts:
            stats: Any = _finished(_generate(loaded, prompt, tree)).stats
            steps += stats.steps
            tokens += stats.emitted
        if steps:
            sizes.append((nodes, expected, tokens / steps))
    return tuple(sizes)
