"""How often each prediction of each head is right, measured on answers it has not seen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example, collate, group_by_length
from medusa_chat.training.loss import IGNORED, LMHead, hidden_and_targets


@dataclass(frozen=True)
class RankCounts:
    """Counts so far. hits[k][i]: the (i+1)-th prediction of head k was right; labels[k]: asked.

    done of total batches are in.
    """

    hits: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    done: int
    total: int

    @property
    def accuracies(self) -> list[list[float]]:
        """a[k][i], each head over its own number of labels (Medusa, arXiv 2401.10774, 2.3.3)."""
        pairs = zip(self.hits, self.labels, strict=True)
        return [[hit / max(asked, 1) for hit in hits] for hits, asked in pairs]


def count_ranks(
    model: Any,
    heads: MedusaHeads,
    examples: Sequence[Example],
    ranks: int = 10,
    batch_tokens: int = 2048,
    lm_head: LMHead | None = None,
) -> Iterator[RankCounts]:
    """Count over every label of the examples, one event a batch.

    lm_head: the model's own output layer if None.
    """
    if not examples:
        raise UsageError("no examples to measure the heads on")
    lm_head = lm_head or model.get_output_embeddings()
    groups = group_by_length(examples, batch_tokens, seed=0)
    hits = torch.zeros(len(heads), ranks, dtype=torch.long)
    labels = torch.zeros(len(heads), dtype=torch.long)
    for done, group in enumerate(groups, start=1):
        hidden, targets, _ = hidden_and_targets(model, collate(group), len(heads))
        for rows, wanted in zip(hidden.split(256), targets.split(256), strict=True):
            hits += rank_hits(heads, lm_head, rows, wanted, ranks).cpu()
        labels += (targets != IGNORED).sum(0).cpu()
        rows_of_hits = tuple(tuple(row) for row in hits.tolist())
        yield RankCounts(rows_of_hits, tuple(labels.tolist()), done, len(groups))


@torch.inference_mode()
def rank_hits(
    heads: MedusaHeads, lm_head: LMHead, hidden: Tensor, targets: Tensor, ranks: int
) -> Tensor:
    """hidden [n, d], targets [n, K] -> [K, ranks]: how often each rank was the token."""
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=half):
        best = heads(hidden, lm_head).topk(ranks, dim=-1).indices
    hits: Tensor = (best == targets.T.unsqueeze(-1)).sum(1)
    return hits


def rank_accuracies(
    model: Any, heads: MedusaHeads, examples: Sequence[Example], ranks: int = 10
) -> list[list[float]]:
    """a[k][i]: how often the (i+1)-th prediction of head k alone is right, on every label."""
    counts = list(count_ranks(model, heads, examples, ranks))
    return counts[-1].accuracies


@torch.inference_mode()
def ranks_of_answer(
    model: Any,
    heads: MedusaHeads,
    example: Example,
    ranks: int = 10,
    lm_head: LMHead | None = None,
) -> list[list[int | None]]:
    """What `path_search` asks of one example, whose labels are its last tokens: a row for each
    label as a root, and in it for head k the rank from 0 of the token k + 1 places on."""
    first = example.is_label.index(True)
    ids = torch.tensor(example.ids, device=heads.weight.device)
    hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    lm_head = lm_head or model.get_output_embeddings()
    half = hidden.dtype in (torch.bfloat16, torch.float16)  # the heads may be in fp32
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=half):
        return ranks_after(hidden[first - 1 : -1], example.ids[first:], heads, lm_head, ranks)


@torch.inference_mode()
def ranks_after(
    hidden: Tensor, answer: Sequence[int], heads: MedusaHeads, lm_head: LMHead, ranks: int
) -> list[list[int | None]]:
    """The same from hidden [n, d]: one row before each of the answer's n tokens."""
    parts = [heads(rows, lm_head).topk(ranks, dim=-1).indices for rows in hidden.split(256)]
    best = torch.cat(parts, dim=1).tolist()
    return [
        [
            best[head][place].index(token) if token in best[head][place] else None
            for head, token in enumerate(answer[place + 1 : place + 1 + len(heads)])
        ]
        for place in range(len(answer))
    ]
