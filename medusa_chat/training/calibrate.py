"""`medusa-chat calibrate`: rank accuracies on the backbone's own greedy answers, the tree they ask
for, and the tokens a step it really gives."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from medusa_chat import paths
from medusa_chat.checkpoints.load import LoadedModel, load
from medusa_chat.decoding.events import Event, Finished
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ContextError, MedusaChatError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.training.accuracy import rank_hits, ranks_after
from medusa_chat.training.checkpoint_writer import Calibrated
from medusa_chat.training.conversations import Conversation, read_conversations
from medusa_chat.training.data import encode_prompt
from medusa_chat.training.distill_conversations import Answered
from medusa_chat.training.examples import require_template
from medusa_chat.training.loss import IGNORED, head_targets
from medusa_chat.training.path_search import Answer as Foreseen
from medusa_chat.training.run import Stage, Written

MOST_CONVERSATIONS = 256
ANSWER_TOKENS = 128
MEASURED_PROMPTS = 8
RANKS = 10
CHUNK = 512


@dataclass(frozen=True)
class Measured:
    """(nodes, tokens a step expected, tokens a step measured) of the tree cut to each size."""

    sizes: tuple[tuple[int, float, float], ...]


def calibrate(
    request: LoadRequest,
    data: Sequence[Path],
    nodes: int,
    output: Path,
    chats: Sequence[Conversation] = (),
) -> Iterator[Stage | Answered | Calibrated | Measured | Written]:
    """Measure, search, measure again, and write `output` whole. Raises MedusaChatError.

    chats: of the user, asked again beside the data.
    """
    found = [*chats, *(one for path in data for one in read_conversations(path, prompts=True))]
    if not found:
        raise UsageError(f"{', '.join(map(str, data))} holds no prompt: the data is empty")
    chosen = random.Random(0).sample(found, min(len(found), MOST_CONVERSATIONS))
    yield Stage("loading")
    *_, (_, loaded) = load(request)
    assert loaded is not None
    if not loaded.info.heads:
        raise UsageError(f"{loaded.info.name} has no Medusa heads: train some first")
    require_template(loaded.tokenizer, chosen)
    yield Stage("answers")
    ranks = min(RANKS, loaded.engine.backbone.vocabulary)
    hits = torch.zeros(loaded.info.heads, ranks, dtype=torch.long)
    labels = torch.zeros(loaded.info.heads, dtype=torch.long)
    asked: list[list[int]] = []
    foreseen: list[Foreseen] = []
    total, tokens = sum(len(one.asked) for one in chosen), 0
    for prompt, answer in _answers(loaded, chosen):
        asked.append(prompt)
        tokens += len(answer)
        foreseen.append(count_answer(loaded, prompt, answer, hits, labels))
        yield Answered(len(asked), max(total, len(asked)), tokens)
    if not int(labels.sum()):
        raise UsageError("the answers are too short to measure the heads on: give other prompts")
    table = [
        [hit / max(count, 1) for hit in row]
        for row, count in zip(hits.tolist(), labels.tolist(), strict=True)
    ]
    names = [*(["the user's own chats"] if chats else []), *(path.name for path in data)]
    what = f"{len(asked)} greedy answers of the backbone to {', '.join(names)}"
    calibrated = Calibrated.search(table, nodes, what, int(labels[0]), foreseen)
    if loaded.calibration is not None:
        calibrated = replace(calibrated, shortlist=loaded.calibration.shortlist)
    yield calibrated
    yield Stage("measuring")
    yield Measured(_measured(loaded, calibrated, asked[:MEASURED_PROMPTS]))
    try:
        paths.write_text(output, json.dumps(calibrated.to_json()) + "\n")
    except OSError as error:
        raise MedusaChatError(f"{output} cannot be written: {error.strerror}") from error
    yield Written(str(output), output.stat().st_size)


def _answers(
    loaded: LoadedModel, conversations: Sequence[Conversation]
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of every question, asked in order; those without room are left."""
    tree = loaded.calibration.tree if loaded.calibration else None
    for found in conversations:
        talk = [dict(m) for m in found.messages if m["role"] == "system"][:1]
        for text in found.asked:
            talk.append({"role": "user", "content": text})
            prompt = encode_prompt(loaded.tokenizer, talk)
            try:
                answer = _finished(_generate(loaded, prompt, tree)).token_ids
            except ContextError:
                break
            yield prompt, list(answer)
            said = loaded.tokenizer.decode(answer, skip_special_tokens=True)
            talk.append({"role": "assistant", "content": said})


def _generate(loaded: LoadedModel, prompt: list[int], tree: Tree | None) -> Iterator[Event]:
    """A greedy answer, exact, so it is the backbone's own; with the tree where one is given."""
    engine = loaded.engine
    settings = GenerationSettings(
        drafter="medusa" if tree else "none",
        max_new_tokens=ANSWER_TOKENS,
        nodes=len(tree) if tree else 1,
        seed=0,
    )
    shape = (tree or Tree.from_choices([])).pruned(loaded.info.heads)
    drafter = engine.drafter(settings, shape, details=False)
    return engine.generate(prompt, drafter, settings, details=False)


def _finished(events: Iterator[Event]) -> Finished:
    *_, last = events
    assert isinstance(last, Finished)
    return last


@torch.inference_mode()
def count_answer(
    loaded: LoadedModel,
    prompt: list[int],
    answer: list[int],
    hits: torch.Tensor,
    labels: torch.Tensor,
) -> Foreseen:
    """Add one answer to the counts: hits [K, R] of each rank alone, labels [K]. Returns which
    ranks the tokens of the answer had, place by place."""
    engine = loaded.engine
    backbone, heads = engine.backbone, engine.heads
    assert heads is not None
    ids = torch.tensor(prompt + answer, device=backbone.device)
    engine.forget()
    hidden = torch.cat([backbone.run_chunk(part) for part in ids.split(CHUNK)])
    engine.forget()
    is_label = torch.arange(len(ids), device=ids.device) >= len(prompt)
    targets = head_targets(ids[None], is_label[None], len(heads))[0]
    chosen = (targets != IGNORED).any(-1)
    for rows, wanted in zip(hidden[chosen].split(256), targets[chosen].split(256), strict=True):
        hits += rank_hits(heads, backbone.lm_head, rows, wanted, hits.shape[1]).cpu()
    labels += (targets != IGNORED).sum(0).cpu()
    before = hidden[len(prompt) - 1 : -1]
    return ranks_after(before, answer, heads, backbone.lm_head, hits.shape[1])


def _measured(
    loaded: LoadedModel, calibrated: Calibrated, prompts: list[list[int]]
) -> tuple[tuple[int, float, float], ...]:
    """By tree size; answers without a step are left out."""
    sizes: list[tuple[int, float, float]] = []
    for nodes, expected in calibrated.expected.items():
        if nodes == 1:
            continue
        tree, steps, tokens = calibrated.tree.head(nodes), 0, 0.0
        for prompt in prompts:
            stats: Any = _finished(_generate(loaded, prompt, tree)).stats
            steps += stats.steps
            tokens += (stats.acceleration_rate or 0.0) * stats.steps
        if steps:
            sizes.append((nodes, expected, tokens / steps))
    return tuple(sizes)
