"""How often each prediction of each head is right, measured on answers it was not trained on."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.heads import MedusaHeads, half_precision
from medusa_chat.training.data import Example
from medusa_chat.training.loss import LMHead
from medusa_chat.training.path_search import Answer

RANKS = 10  # predictions of a head that are counted
ROWS = 256  # whose logits exist at a time
CHUNK = 512  # tokens of one pass of the backbone


def accuracies_of(answers: Sequence[Answer], heads: int) -> tuple[list[list[float]], list[int]]:
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
def states_of(engine: Engine, ids: Tensor) -> Tensor:
    """ids [n] int64 -> hidden states [n, d] of the engine's backbone. Empties its cache."""
    engine.forget()
    hidden = torch.cat([engine.backbone.run_chunk(part) for part in ids.split(CHUNK)])
    engine.forget()
    return hidden


@torch.inference_mode()
def ranks_of(
    model: Any, heads: MedusaHeads, example: Example, listed: Sequence[int] = ()
) -> list[Answer]:
    """The ranks of each answer of an example, its runs of labels, for `path_search`: a row for each
    label as the root, and in it for head k the rank from 0 of the token k + 1 places later, None
    where that is not among the first RANKS. listed: the tokens that are drafted, where not all are:
    the others take no rank."""
    ids = torch.tensor(example.ids, device=heads.weight.device)
    hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    lm_head = LogitHead(model.get_output_embeddings(), model.config.get_text_config())
    with half_precision(hidden):
        return [
            ranks_after(hidden[start - 1 : end - 1], example.ids[start:end], heads, lm_head, listed)
            for start, end in _answers(example)
        ]


def _answers(example: Example) -> Iterator[tuple[int, int]]:
    """Where each run of labels begins and ends; the text's first token is predicted by nothing."""
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
    tokens = torch.tensor(listed, device=hidden.device)
    roots = torch.tensor(answer, dtype=torch.long, device=hidden.device)
    parts = []
    for states, some in zip(hidden.split(ROWS), roots.split(ROWS), strict=True):
        logits = heads(states, some, lm_head)
        logits = logits[..., tokens] if listed else logits
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
