"""The calibration of heads: how often each prediction is right on answers, and their best tree.

`medusa-chat calibrate` measures a checkpoint on the backbone's greedy answers to prompts; a
training measures its new heads on held-out prompts.
"""

import json
import random
import shutil
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_chat import paths
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.heads import MedusaHeads, half_precision
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ContextError, ConversationRefused, MedusaChatError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.training.answerers import (
    BatchAnswerer,
    answerer_of,
    batch_rows,
    turn_ends,
)
from medusa_chat.training.checkpoint_writer import renew_figures
from medusa_chat.training.conversations import Conversation, left_out_line, read_conversations
from medusa_chat.training.distill import Answered, DistillRecipe, answer_conversations
from medusa_chat.training.events import Note, Stage, Written
from medusa_chat.training.examples import Example, encode_prompt, require_template
from medusa_chat.training.loss import LMHead, shortlist
from medusa_chat.training.packed_model import PackedModel, for_loss, states_of
from medusa_chat.training.setup import TrainingSetup, stages_of
from medusa_chat.trees.calibration import CALIBRATION_FILE, TREE_NODES, AnswerRanks, Calibration

MOST_CONVERSATIONS = 256
ANSWER_TOKENS = 128
MEASURED_PROMPTS = 8
RANKS = 10  # predictions of a head that are counted
ROWS = 256  # whose logits exist at a time


@dataclass(frozen=True)
class Measured:
    """(nodes, tokens a step expected, tokens a step measured) of the tree cut to each size."""

    sizes: tuple[tuple[int, float, float], ...]


class Greedy(NamedTuple):
    """A greedy answer, as token ids, with the ranks that the heads gave to them."""

    prompt: list[int]
    answer: list[int]
    ranks: AnswerRanks


def calibrate(
    request: LoadRequest,
    data: Sequence[Path],
    nodes: int,
    output: Path,
    chats: Sequence[Conversation] = (),
) -> Generator[Stage | Note | Answered | Calibration | Measured | Written, None, None]:
    """Measure the heads on greedy answers to the prompts, search the tree of at most `nodes` nodes,
    measure its tokens per step and write `output`, and its figures into the card beside it. chats:
    the user's own, whose questions are answered again too. Raises MedusaChatError."""
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
        tokens += len(answer.answer)
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
    whole = [*chats, *(one for file in files for one in file.conversations)]
    if not whole:
        raise UsageError(f"{', '.join(map(str, data))} has no prompt: give other --data")
    notes = [Note(line) for file in files for line in file.notes]
    return random.Random(0).sample(whole, min(len(whole), MOST_CONVERSATIONS)), notes


def _load(request: LoadRequest) -> Generator[Stage, None, LoadedModel]:
    loaded = yield from stages_of(load(request))
    if not loaded.info.heads:
        raise UsageError(f"{loaded.info.name} has no Medusa heads: train heads first")
    return loaded


def _sources(data: Sequence[Path], chats: Sequence[Conversation]) -> str:
    return ", ".join([*(["the user's own chats"] if chats else []), *(path.name for path in data)])


def _search(
    loaded: LoadedModel, answers: Sequence[Greedy], nodes: int, sources: str
) -> Calibration:
    """The calibration with the best tree, and with the checkpoint's shortlist, or a first one where
    the answers are enough for it."""
    vocabulary, ranks = loaded.engine.backbone.vocabulary, [answer.ranks for answer in answers]
    accuracies, labels = accuracies_of(ranks, loaded.info.heads)
    if not any(labels):
        raise UsageError("the answers are too short to measure the heads on: give other prompts")
    measured_on = f"{len(answers)} greedy answers of the backbone to {sources}"
    calibrated = Calibration.search(accuracies, nodes, measured_on, labels[0], ranks)
    kept = loaded.calibration.shortlist if loaded.calibration is not None else ()
    texts = (answer.answer for answer in answers)
    return replace(calibrated, shortlist=kept or shortlist(texts, vocabulary))


def _write(calibrated: Calibration, output: Path) -> Iterator[Written]:
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
    # not the whole tree: on a CPU its nodes cost more than they bring
    tree = loaded.auto_tree(loaded.info.nodes).tree
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
    """The end of a greedy answer with exact acceptance, which is the backbone's own."""
    engine = loaded.engine
    settings = GenerationSettings(
        drafter="medusa", max_new_tokens=ANSWER_TOKENS, nodes=len(tree), seed=0
    )
    drafter = engine.drafter(settings, tree.pruned(loaded.info.heads))
    *_, last = engine.generate(prompt, drafter, settings, details=False)
    assert isinstance(last, Finished)
    return last


def _measured(
    loaded: LoadedModel, calibrated: Calibration, prompts: list[list[int]]
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


# ---------------------------------------------------------------------- the heads of a training


def calibrate_heads(
    setup: TrainingSetup,
    heads: MedusaHeads,
    conversations: Sequence[Conversation],
    held_out: Sequence[Example],
    folder: Path,
    listed: Sequence[int] = (),
) -> Generator[Note, None, Calibration]:
    """Measure the heads on greedy answers to the held-out prompts, as decoding uses them, and
    search the tree on these answers. Where the held-out data is plain text or cannot be answered,
    a note says so: the examples themselves are measured, and the tree follows from the products of
    the accuracies (Medusa, arXiv 2401.10774, 2.3.3). The answers are written below `folder`.
    listed: the tokens that are drafted, where not all are."""
    places = {example.place for example in held_out}
    prompts = [one for one in conversations if one.place in places and one.messages]
    answers, why = list[Example](), "plain text has no prompts"
    if prompts:
        try:
            answers = _greedy_answers(setup, prompts, folder / "calibration")
            why = "the answers are too short"
        except UsageError as error:  # a training of hours must not fail for that
            why = str(error)
    if not answers:
        yield Note(f"the heads are measured on held-out rows instead of greedy answers: {why}")
    measured = answers or list(held_out)
    source = "greedy answers of the backbone to held-out prompts" if answers else "held-out rows"
    ranks = [rows for one in measured for rows in ranks_of(setup.model, heads, one, listed)]
    accuracies, labels = accuracies_of(ranks, len(heads))
    is_searched = answers and any(row and row[0] is not None for rows in ranks for row in rows)
    what = f"{len(measured)} {source}"
    searched = ranks if is_searched else []  # else the accuracies give a tree
    return Calibration.search(accuracies, TREE_NODES, what, labels[0], searched)


def _greedy_answers(
    setup: TrainingSetup, prompts: Sequence[Conversation], folder: Path
) -> list[Example]:
    """Greedy answers to every question. Raises UsageError where no prompt fits or the backbone has
    no end token."""
    greedy = DistillRecipe(
        max_new_tokens=min(ANSWER_TOKENS, setup.length // 2),
        temperatures=(0.0,),
        rows=batch_rows(setup),
    )
    shutil.rmtree(folder, ignore_errors=True)  # a resumed training may answer in another way
    if isinstance(setup.model, PackedModel):
        answerer = answerer_of(setup)
    else:  # they are few and short: not worth laying the model out anew for the C pass
        answerer = BatchAnswerer(setup.model, turn_ends(setup))
    events = answer_conversations(answerer, setup.tokenizer, prompts, greedy, setup.length, folder)
    answered = (event for event in events if isinstance(event, Answered))
    return [event.example for event in answered if event.example is not None]


# ------------------------------------------------------------------------------ ranks of tokens


def accuracies_of(
    answers: Sequence[AnswerRanks], heads: int
) -> tuple[list[list[float]], list[int]]:
    """a[k][i], how often the (i+1)-th prediction of head k was right over the labels of the answers
    (`ranks_after`), which are all their tokens (Medusa, arXiv 2401.10774, 2.3.3); and how many
    labels each head has."""
    hits, labels = [[0] * RANKS for _ in range(heads)], [0] * heads
    for row in (row for answer in answers for row in answer):
        for head, rank in enumerate(row):
            labels[head] += 1
            if rank is not None:
                hits[head][rank] += 1
    pairs = zip(hits, labels, strict=True)
    return [[hit / max(count, 1) for hit in row] for row, count in pairs], labels


@torch.inference_mode()
def ranks_of(
    model: Any, heads: MedusaHeads, example: Example, listed: Sequence[int] = ()
) -> list[AnswerRanks]:
    """The ranks of each answer of an example, its runs of labels, for `tree_search`: a row for each
    label as the root, and in it for head k the rank from 0 of the token k + 1 places later, None
    where that is not among the first RANKS. listed: the tokens that are drafted, where not all are:
    the others take no rank."""
    ids = torch.tensor(example.ids, device=heads.weight.device)
    states = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    hidden = for_loss(model, states)
    lm_head = LogitHead(model.get_output_embeddings(), model.config.get_text_config())
    with half_precision(hidden):
        return [
            ranks_after(hidden[start - 1 : end - 1], example.ids[start:end], heads, lm_head, listed)
            for start, end in _runs(example)
        ]


def _runs(example: Example) -> Iterator[tuple[int, int]]:
    """Where each run of labels begins and ends; nothing predicts the first token of the text."""
    end = 0
    for is_label, run in groupby(example.is_label):
        start, end = end, end + sum(1 for _ in run)
        if is_label:
            yield max(start, 1), end


@torch.inference_mode()
def ranks_after(
    hidden: Tensor,
    answer: Sequence[int],
    heads: MedusaHeads,
    lm_head: LMHead,
    listed: Sequence[int] = (),
) -> list[list[int | None]]:
    """As ranks_of, from hidden [n, d] in the backbone's dtype: the states before each of one
    answer's n tokens."""
    tokens = torch.tensor(listed, dtype=torch.long, device=hidden.device)
    short = lm_head.rows(tokens) if listed and isinstance(lm_head, LogitHead) else None
    if short is not None and hidden.dtype == torch.float32 and type(short.linear) is nn.Linear:
        short.linear.float()  # of weights in 16 bits, whose products C sums in fp32
    roots = torch.tensor(answer, dtype=torch.long, device=hidden.device)
    parts = []
    for states, some in zip(hidden.split(ROWS), roots.split(ROWS), strict=True):
        logits = heads(states, some, short or lm_head)
        logits = logits[..., tokens] if listed and short is None else logits
        best = logits.topk(min(RANKS, logits.shape[-1])).indices
        parts.append(tokens[best] if listed else best)
    return ranks_in(torch.cat(parts, dim=1).tolist(), answer)


def ranks_in(best: Sequence[Sequence[list[int]]], answer: Sequence[int]) -> list[list[int | None]]:
    """The rows of ranks_after. best[k][place]: the guesses of head k."""
    return [
        [
            guesses[place].index(token) if token in guesses[place] else None
            for guesses, token in zip(best, answer[place + 1 :], strict=False)
        ]
        for place in range(len(answer))
    ]
