"""`medusa-chat calibrate`: rank accuracies on the backbone's own answers, and their best tree.

The answers are greedy. What is written also says the tokens a step that the tree really gives."""

import json
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from medusa_chat import paths
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ContextError, ConversationRefused, MedusaChatError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.training.accuracy import accuracies_of, ranks_after, states_of
from medusa_chat.training.checkpoint_writer import Calibrated
from medusa_chat.training.conversations import (
    Conversation,
    left_out_line,
    read_conversations,
)
from medusa_chat.training.data import encode_prompt
from medusa_chat.training.distill_conversations import Answered
from medusa_chat.training.events import Note, Stage, Written
from medusa_chat.training.examples import require_template
from medusa_chat.training.model_card import renew_figures
from medusa_chat.training.path_search import Answer as AnswerRanks
from medusa_chat.training.short_vocabulary import shortlist
from medusa_chat.trees.calibration import CALIBRATION_FILE

MOST_CONVERSATIONS = 256
ANSWER_TOKENS = 128
MEASURED_PROMPTS = 8


@dataclass(frozen=True)
class Measured:
    """(nodes, tokens a step expected, tokens a step measured) of the tree cut to each size."""

    sizes: tuple[tuple[int, float, float], ...]


class Greedy(NamedTuple):
    """A greedy answer. prompt, said: token ids; ranks: of every token of the answer, for the search
    of the tree."""

    prompt: list[int]
    said: list[int]
    ranks: AnswerRanks


def calibrate(
    request: LoadRequest,
    data: Sequence[Path],
    nodes: int,
    output: Path,
    chats: Sequence[Conversation] = (),
) -> Iterator[Stage | Note | Answered | Calibrated | Measured | Written]:
    """Measure the heads on greedy answers to the prompts, search the tree of at most `nodes` nodes,
    measure its tokens a step and write `output`, and its figures into the card beside it. chats:
    the user's own, asked again beside the data. Raises MedusaChatError."""
    conversations, notes = _choose(data, chats)
    yield from notes
    yield Stage("loading")
    loaded = yield from _load(request)
    require_template(loaded.tokenizer, conversations)
    yield Stage("answers")
    answers, refused, tokens = list[Greedy](), list[str](), 0
    total = sum(len(one.asked) for one in conversations)
    for answer in _answers(loaded, conversations, refused):
        answers.append(answer)
        tokens += len(answer.said)
        yield Answered(len(answers), max(total, len(answers)), tokens)
    if refused and not answers:
        raise UsageError(refused[0])
    if refused:
        yield Note(left_out_line(refused, f"{total:,} questions and what follows them"))
    calibrated = _search(loaded, answers, nodes, _sources(data, chats))
    yield calibrated
    yield Stage("measuring")
    prompts = [answer.prompt for answer in answers[:MEASURED_PROMPTS]]
    yield Measured(_measured(loaded, calibrated, prompts))
    yield from _write(calibrated, output)


def _choose(
    data: Sequence[Path], chats: Sequence[Conversation]
) -> tuple[list[Conversation], list[Note]]:
    """(at most MOST_CONVERSATIONS, drawn with seed 0; what was left out of the files). Raises
    UsageError without any."""
    files = [read_conversations(path, prompts=True) for path in data]
    found = [*chats, *(one for file in files for one in file.conversations)]
    if not found:
        raise UsageError(f"{', '.join(map(str, data))} holds no prompt: give other --data")
    notes = [Note(line) for file in files for line in file.notes]
    return random.Random(0).sample(found, min(len(found), MOST_CONVERSATIONS)), notes


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


def _search(loaded: LoadedModel, answers: Sequence[Greedy], nodes: int, sources: str) -> Calibrated:
    """The calibration with the best tree, and with the checkpoint's shortlist, or a first one where
    the answers are enough for it."""
    vocabulary, ranks = loaded.engine.backbone.vocabulary, [answer.ranks for answer in answers]
    accuracies, labels = accuracies_of(ranks, loaded.info.heads)
    if not any(labels):
        raise UsageError("the answers are too short to measure the heads on: give other prompts")
    measured_on = f"{len(answers)} greedy answers of the backbone to {sources}"
    found = Calibrated.search(accuracies, nodes, measured_on, labels[0], ranks)
    kept = loaded.calibration.shortlist if loaded.calibration is not None else ()
    said = (answer.said for answer in answers)
    return replace(found, shortlist=kept or shortlist(said, vocabulary))


def _write(calibrated: Calibrated, output: Path) -> Iterator[Written]:
    written, card = output, output.with_name("README.md")
    try:
        paths.write_text(output, json.dumps(calibrated.to_json()) + "\n")
        yield Written(str(output), output.stat().st_size)
        written = card
        if output.name == CALIBRATION_FILE and renew_figures(card, calibrated):
            yield Written(str(card), card.stat().st_size)
    except OSError as error:
        raise MedusaChatError(f"{written} cannot be written: {error.strerror}") from error


def _answers(
    loaded: LoadedModel, conversations: Sequence[Conversation], refused: list[str]
) -> Iterator[Greedy]:
    """The answer to every question, each conversation's in order. A conversation ends where its
    next prompt does not fit into the context, or is refused by the chat template: refused gets the
    place and the reason."""
    tree, _ = loaded.auto_tree()  # not the whole: on a CPU its nodes cost more than they bring
    for conversation in conversations:
        messages = conversation.system_messages
        for text in conversation.asked:
            messages.append({"role": "user", "content": text})
            try:
                prompt = encode_prompt(loaded.tokenizer, messages)
                answer = list(_answer(loaded, prompt, tree).token_ids)
            except ContextError:
                break
            except ConversationRefused as error:
                refused.append(f"{conversation.place}: {error}")
                break
            yield Greedy(prompt, answer, _ranks(loaded, prompt, answer))
            reply = loaded.tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": reply})


def _ranks(loaded: LoadedModel, prompt: list[int], answer: list[int]) -> AnswerRanks:
    """The heads' ranks of an answer's tokens."""
    engine, heads, backbone = loaded.engine, loaded.engine.heads, loaded.engine.backbone
    assert heads is not None
    hidden = states_of(engine, torch.tensor(prompt + answer, device=backbone.device))
    listed = [] if heads.shortlist is None else heads.shortlist.tolist()
    return ranks_after(hidden[len(prompt) - 1 : -1], answer, heads, backbone.lm_head, listed)


def _answer(loaded: LoadedModel, prompt: list[int], tree: Tree) -> Finished:
    """The end of a greedy answer with exact acceptance, so the backbone's own."""
    engine = loaded.engine
    settings = GenerationSettings(
        drafter="medusa", max_new_tokens=ANSWER_TOKENS, nodes=len(tree), seed=0
    )
    drafter = engine.drafter(settings, tree.pruned(loaded.info.heads))
    *_, last = engine.generate(prompt, drafter, settings, details=False)
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
            stats = _answer(loaded, prompt, tree).stats
            steps += stats.steps
            tokens += stats.emitted
        if steps:
            sizes.append((nodes, expected, tokens / steps))
    return tuple(sizes)
