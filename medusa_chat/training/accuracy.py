"""How often each prediction of each head is right, measured on answers it was not trained on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.heads import MedusaHeads, half_precision
from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example, collate, group_by_length
from medusa_chat.training.loss import IGNORED, LMHead, hidden_and_targets
from medusa_chat.training.path_search import Answer

RANKS = 10  # predictions of a head that are counted
ROWS = 256  # whose logits exist at a time
CHUNK = 512  # tokens of one pass of the backbone


@dataclass(frozen=True)
class RankCounts:
    """Counts so far. hits[k][i]: how often the (i+1)-th prediction of head k was right; labels[k]:
    of how many. done of total batches are counted."""

    hits: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    done: int
    total: int

    @property
    def accuracies(self) -> list[list[float]]:
        """a[k][i], each head over its own number of labels (Medusa, arXiv 2401.10774, 2.3.3)."""
        pairs = zip(self.hits, self.labels, strict=True)
        return [[hit / max(count, 1) for hit in hits] for hits, count in pairs]


def count_ranks(
    model: Any,
    heads: MedusaHeads,
    examples: Sequence[Example],
    ranks: int = RANKS,
    batch_tokens: int = 2048,
    lm_head: LMHead | None = None,
    listed: Sequence[int] = (),
) -> Iterator[RankCounts]:
    """Count over every label of the examples, one event a batch. lm_head: None is the model's own
    output layer. listed: see ranks_of_answer. Raises UsageError without examples."""
    if not examples:
        raise UsageError("there are no examples to measure the heads on: give other --data")
    lm_head = lm_head or model.get_output_embeddings()
    groups = group_by_length(examples, batch_tokens, seed=0)
    hits = torch.zeros(len(heads), ranks, dtype=torch.long)
    labels = torch.zeros(len(heads), dtype=torch.long)
    for done, group in enumerate(groups, start=1):
        hidden, roots, targets, _ = hidden_and_targets(model, collate(group), len(heads))
        hits += count_hits(heads, lm_head, hidden, roots, targets, ranks, listed)
        labels += (targets != IGNORED).sum(0).cpu()
        rows = tuple(tuple(row) for row in hits.tolist())
        yield RankCounts(rows, tuple(labels.tolist()), done, len(groups))


def counts_of(answers: Sequence[Answer], heads: int, ranks: int = RANKS) -> RankCounts:
    """The same counts from the ranks of whole answers (`ranks_after`), whose labels are all their
    tokens."""
    hits, labels = [[0] * ranks for _ in range(heads)], [0] * heads
    for row in (row for answer in answers for row in answer):
        for head, rank in enumerate(row):
            labels[head] += 1
            if rank is not None:
                hits[head][rank] += 1
    return RankCounts(tuple(map(tuple, hits)), tuple(labels), len(answers), len(answers))


@torch.inference_mode()
def count_hits(
    heads: MedusaHeads,
    lm_head: LMHead,
    hidden: Tensor,
    roots: Tensor,
    targets: Tensor,
    ranks: int,
    listed: Sequence[int] = (),
) -> Tensor:
    """hidden [n, d], roots int64 [n], targets [n, K] int64 with IGNORED where there is none ->
    [K, ranks] int64 on the CPU: how often each rank was the target."""
    hits = torch.zeros(len(heads), ranks, dtype=torch.long)
    chosen = (targets != IGNORED).any(-1)
    parts = (tensor[chosen].split(ROWS) for tensor in (hidden, roots, targets))
    for rows, tokens, wanted in zip(*parts, strict=True):
        with half_precision(rows):
            best = _guesses(heads, lm_head, rows, tokens, ranks, listed)
        found = (best == wanted.T.unsqueeze(-1)).sum(1).cpu()
        hits[:, : found.shape[1]] += found
    return hits


def _guesses(
    heads: MedusaHeads,
    lm_head: LMHead,
    hidden: Tensor,
    roots: Tensor,
    ranks: int,
    listed: Sequence[int],
) -> Tensor:
    """hidden [n, d], roots int64 [n] -> the first `ranks` guesses of each head, int64
    [K, n, ranks], or fewer where fewer tokens are listed."""
    logits = heads(hidden, roots, lm_head)
    if not listed:
        return logits.topk(ranks).indices
    tokens = torch.tensor(listed, device=logits.device)
    return tokens[logits[..., tokens].topk(min(ranks, len(tokens))).indices]


@torch.inference_mode()
def states_of(engine: Engine, ids: Tensor) -> Tensor:
    """ids [n] int64 -> hidden states [n, d] of the engine's backbone. Empties its cache."""
    engine.forget()
    hidden = torch.cat([engine.backbone.run_chunk(part) for part in ids.split(CHUNK)])
    engine.forget()
    return hidden


@torch.inference_mode()
def ranks_of_answer(
    model: Any,
    heads: MedusaHeads,
    example: Example,
    ranks: int = RANKS,
    lm_head: LMHead | None = None,
    listed: Sequence[int] = (),
) -> list[list[int | None]]:
    """The ranks of one example whose labels are its last tokens, for `path_search`: a row for each
    label as the root, and in it for head k the rank from 0 of the token k + 1 places later, None
    where that is not among the first `ranks`. listed: the tokens that are drafted, where not all
    are: the others take no rank."""
    first = example.is_label.index(True)
    ids = torch.tensor(example.ids, device=heads.weight.device)
    hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    lm_head = lm_head or model.get_output_embeddings()
    with half_precision(hidden):
        before, answer = hidden[first - 1 : -1], example.ids[first:]
        return ranks_after(before, answer, heads, lm_head, ranks, listed)


@torch.inference_mode()
def ranks_after(
    hidden: Tensor,
    answer: Sequence[int],
    heads: MedusaHeads,
    lm_head: LMHead,
    ranks: int,
    listed: Sequence[int] = (),
) -> list[list[int | None]]:
    """As ranks_of_answer, from hidden [n, d] in the backbone's dtype: the states before each of the
    answer's n tokens."""
    roots = torch.tensor(answer, dtype=torch.long, device=hidden.device)
    pairs = zip(hidden.split(ROWS), roots.split(ROWS), strict=True)
    parts = [_guesses(heads, lm_head, *pair, ranks, listed) for pair in pairs]
    return ranks_in(torch.cat(parts, dim=1).tolist(), answer)


def ranks_in(best: Sequence[Sequence[list[int]]], answer: Sequence[int]) -> list[list[int | None]]:
    """The rows of ranks_of_answer. best[k][place]: the guesses of head k."""
    return [
        [
            guesses[place].index(token) if token in guesses[place] else None
            for guesses, token in zip(best, answer[place + 1 :], strict=False)
        ]
        for place in range(len(answer))
    ]
