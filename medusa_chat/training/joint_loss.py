"""The loss of Medusa-2: the backbone's own and the heads'."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.chunked_loss import chunked_sum, cross_entropy
from medusa_chat.training.data import Batch, Example, collate, group_by_length
from medusa_chat.training.hidden_states import make_batch
from medusa_chat.training.lora import set_dropout
from medusa_chat.training.loss import (
    IGNORED,
    HeadLosses,
    LMHead,
    head_targets,
    medusa_loss,
    run_decoder,
)
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.stage_recipes import Evaluated, JointRecipe, shares


def joint_loss(
    model: Any,
    heads: MedusaHeads,
    rows: Sequence[Sequence[Example]],
    recipe: JointRecipe,
    weight: float,
    group: ProcessGroup = ALONE,
    dropout: bool = False,
) -> HeadLosses:
    """L_LM + weight x L_Medusa-1 over this process' rows, means over all processes' labels."""
    base = model.get_base_model()
    device, at_once = base.get_input_embeddings().weight.device, recipe.heads.rows_at_once
    if not rows:  # another process has this batch's rows
        return _nothing(heads, model, device, group)
    batch = make_batch(rows, recipe.heads)
    nexts = next_tokens(batch).to(device)
    targets = head_targets(batch.ids.to(device), batch.is_label.to(device), len(heads))
    chosen = nexts != IGNORED
    count = group.sum(chosen.sum()).clamp(min=1)
    lm_head = LogitHead(base.get_output_embeddings(), base.config.get_text_config())
    taught = _teacher(model, batch, chosen) if recipe.distill else None
    set_dropout(model, dropout)
    hidden = run_decoder(base, batch)
    wanted = nexts[chosen] if taught is None else taught
    learning = list(base.get_output_embeddings().parameters())
    teacher = _teacher_head(base)
    lm = _lm_loss(lm_head, hidden[chosen], wanted, count, at_once, teacher, learning)
    asked = (targets != IGNORED).any(-1)
    labels = group.sum((targets != IGNORED).sum((0, 1)))
    decay = recipe.heads.decay
    medusa = medusa_loss(
        *(heads, lm_head, hidden[asked], targets[asked], decay, at_once, labels), learning=learning
    )
    return replace(medusa, total=lm + weight * medusa.total, lm=lm.detach())


def _nothing(
    heads: MedusaHeads, model: Any, device: torch.device, group: ProcessGroup
) -> HeadLosses:
    zero = sum(p.sum() * 0.0 for p in (*heads.parameters(), *model.parameters()) if p.requires_grad)
    group.sum(torch.zeros((), dtype=torch.long, device=device))
    labels = group.sum(torch.zeros(len(heads), dtype=torch.long, device=device))
    hits = labels.new_zeros(len(heads), 5)
    losses = torch.zeros(len(heads), device=device)
    return HeadLosses(zero, losses, hits, labels, torch.zeros((), device=device))


def next_tokens(batch: Batch) -> Tensor:
    """[b, t]: the next token where it is a label, else IGNORED."""
    wanted = torch.full_like(batch.ids, IGNORED)
    wanted[:, :-1] = batch.ids[:, 1:].masked_fill(~batch.is_label[:, 1:], IGNORED)
    return wanted


@torch.no_grad()
def _teacher(model: Any, batch: Batch, chosen: Tensor) -> Tensor:
    """Hidden states [n, d] of the backbone as it was."""
    set_dropout(model, False)
    with model.disable_adapter():
        return run_decoder(model.get_base_model(), batch)[chosen]


def _teacher_head(base: Any) -> LMHead:
    """The LM head as it was."""
    linear = base.get_output_embeddings()
    return LogitHead(getattr(linear, "base_layer", linear), base.config.get_text_config())


def _lm_loss(
    lm_head: LMHead,
    hidden: Tensor,
    wanted: Tensor,
    count: Tensor,
    at_once: int,
    teacher: LMHead,
    learning: Sequence[Tensor],
) -> Tensor:
    """The backbone's loss, a mean over `count` labels, of which these may be a part: cross-entropy
    with token ids [n], or KL with the teacher's hidden states [n, d]. Logits of at most `at_once`
    rows exist at a time."""

    def part(some: slice, rows: Tensor) -> Tensor:
        goal, logits = wanted[some], lm_head(rows).float()
        if not goal.is_floating_point():
            return cross_entropy(logits, goal, IGNORED).sum() / count
        with torch.no_grad():
            told = teacher(goal).float().log_softmax(-1)
        said = logits.log_softmax(-1)
        return F.kl_div(said, told, log_target=True, reduction="sum") / count

    return chunked_sum(part, hidden, at_once, learning)


@torch.no_grad()
def evaluate_jointly(
    model: Any, heads: MedusaHeads, examples: Sequence[Example], recipe: JointRecipe, step: int
) -> Evaluated:
    """Losses of the backbone and of every head over the examples, each over its own labels."""
    plain = replace(recipe, heads=replace(recipe.heads, sequence_length=0))
    groups = group_by_length(examples, recipe.heads.batch_tokens, recipe.heads.seed)
    results = [joint_loss(model, heads, [[e] for e in group], plain, 1.0) for group in groups]
    counts = [int((next_tokens(collate(group)) != IGNORED).sum()) for group in groups]
    labels = torch.stack([r.labels for r in results]).sum(0)
    sums = torch.stack([r.losses * r.labels for r in results]).sum(0)
    hits = torch.stack([r.hits for r in results]).sum(0)
    lm = sum(float(r.lm or 0.0) * n for r, n in zip(results, counts, strict=True))
    losses = tuple((sums / labels.clamp(min=1)).tolist())
    return Evaluated(step, losses, shares(hits, labels), lm / max(sum(counts), 1))
