"""Medusa-2: a LoRA adapter of the backbone and the heads trained together, resumable at any step.

The loss is L_LM + lambda_0 x L_Medusa-1 (Medusa, arXiv 2401.10774, 2.2.2). The adapter is on every
linear layer of the backbone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import pi, sin
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from medusa_chat.checkpoints.adapters import wrapped_by_peft
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.events import Evaluated, TrainStep
from medusa_chat.training.examples import Batch, Example, collate
from medusa_chat.training.loss import (
    IGNORED,
    ROWS_AT_ONCE,
    HeadInputs,
    HeadLosses,
    LMHead,
    ShortVocabulary,
    chunked_sum,
    evaluate,
    head_targets,
    medusa_loss,
    run_decoder,
)
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.trainer import (
    StageState,
    adamw,
    head_optimizers,
    run_steps,
    stream_batches,
)

SEED_STRIDE = 7919  # between the dropout seeds of two steps


def train_jointly(
    model: Any,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: Recipe,
    held_out: Sequence[Example] = (),
    state: Path | None = None,
    group: ProcessGroup = ALONE,
    short: ShortVocabulary | None = None,
) -> Iterator[TrainStep | Evaluated]:
    """Train the adapter of `model` (see add_adapter) and `heads` in place. state, held_out, group,
    short and errors: as in train_heads."""
    heads.requires_grad_(True)
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizers = [adamw(adapter, recipe.learning_rate, 0.0), *head_optimizers(heads, recipe)]
    stage = StageState(heads, optimizers, recipe, state, model)
    stage.restore()

    def loss(step: int, rows: Sequence[Example]) -> HeadLosses:
        # the dropout depends on seed, step and process alone: a resumed training repeats it
        torch.manual_seed(recipe.seed + SEED_STRIDE * step + group.rank)
        weight = weight_of_heads(step, recipe)
        return joint_loss(model, heads, rows, recipe, weight, group, True, short)

    def held_out_loss(rows: Sequence[Example]) -> HeadLosses:
        return joint_loss(model, heads, rows, recipe, 1.0)

    evaluation = partial(evaluate, held_out_loss, held_out, recipe) if held_out else None
    batches = stream_batches(examples, recipe, stage.step, group)
    yield from run_steps(batches, loss, stage, evaluation, group)


def weight_of_heads(step: int, recipe: Recipe) -> float:
    """lambda_0 at a step from 0 (Medusa, arXiv 2401.10774, 2.2.2)."""
    if recipe.lambda0_schedule == "constant":
        return recipe.lambda0
    return recipe.lambda0 * sin(pi / 2 * (step + 1) / recipe.steps)


def joint_loss(
    model: Any,
    heads: MedusaHeads,
    rows: Sequence[Example],
    recipe: Recipe,
    weight: float,
    group: ProcessGroup = ALONE,
    dropout: bool = False,
    short: ShortVocabulary | None = None,
) -> HeadLosses:
    """L_LM + weight x L_Medusa-1 over this process's rows; the means are over the labels of all
    processes. model: a peft model, see add_adapter. short: the vocabulary of the heads' loss, of an
    LM head without an adapter."""
    base = model.get_base_model()
    device = base.get_input_embeddings().weight.device
    batch = collate(rows)
    labels = next_tokens(batch).to(device)
    targets = head_targets(batch.ids.to(device), batch.is_label.to(device), len(heads))
    targets = targets if short is None else short.columns(targets)
    is_label, is_target = labels != IGNORED, (targets != IGNORED).any(-1)
    lm_count = group.sum(is_label.sum()).clamp(min=1)
    set_dropout(model, dropout)
    wanted = labels[is_label]
    if recipe.distill:
        with torch.no_grad(), model.disable_adapter():
            wanted = run_decoder(base, batch)[is_label]
    hidden = run_decoder(base, batch)
    lm_head = LogitHead(base.get_output_embeddings(), base.config.get_text_config())
    trainable = list(base.get_output_embeddings().parameters())
    frozen = getattr(lm_head.linear, "base_layer", lm_head.linear)  # without its adapter
    teacher = LogitHead(frozen, base.config.get_text_config())
    lm = _lm_loss(lm_head, hidden[is_label], wanted, lm_count, teacher, trainable)
    roots = batch.next_ids.to(device)[is_target]
    medusa = medusa_loss(
        heads,
        lm_head if short is None else short.lm_head,
        HeadInputs(hidden[is_target], roots, targets[is_target]),
        recipe.decay,
        group=group,
        trainable=trainable,
    )
    return replace(medusa, total=lm + weight * medusa.total, lm=lm.detach(), lm_labels=lm_count)


def next_tokens(batch: Batch) -> Tensor:
    """[b, t] int64: the next token where it is a label, otherwise IGNORED."""
    is_next = F.pad(batch.is_label[:, 1:], (0, 1))
    return batch.next_ids.masked_fill(~is_next, IGNORED)


def _lm_loss(
    lm_head: LMHead,
    hidden: Tensor,
    wanted: Tensor,
    count: Tensor,
    teacher: LMHead,
    trainable: Sequence[Tensor],
) -> Tensor:
    """The backbone's loss over hidden [n, d], a scalar in nats, divided by `count`, the labels of
    all processes: cross-entropy with token ids `wanted` [n] int64, or KL(teacher || backbone) with
    the teacher's hidden states `wanted` [n, d]."""

    def chunk_loss(chunk: slice, rows: Tensor) -> Tensor:
        goal, logits = wanted[chunk], lm_head(rows).float()
        if not goal.is_floating_point():
            return F.cross_entropy(logits, goal, reduction="sum") / count
        with torch.no_grad():
            aim = teacher(goal).float().log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), aim, reduction="sum", log_target=True) / count

    return chunked_sum(chunk_loss, hidden, ROWS_AT_ONCE, trainable)


# ------------------------------------------------------------------------- the adapter


def add_adapter(model: Any, recipe: Recipe) -> tuple[Any, tuple[str, ...]]:
    """The model, frozen, wrapped by peft with a new LoRA on every linear layer and the LM head; and
    the names of those layers. An LM head that is tied to the embeddings gets none: that would
    change the embeddings as well."""
    from peft import LoraConfig

    names = linear_names(model)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=list(names),
    )
    torch.manual_seed(recipe.seed)
    return wrapped_by_peft(model.requires_grad_(False), config), names


def linear_names(model: Any) -> tuple[str, ...]:
    """Last parts of the names of the decoder's linear layers, and of an LM head that is not tied to
    the embeddings."""
    names = {
        name.rpartition(".")[2]
        for name, part in model.get_decoder().named_modules()
        if isinstance(part, (nn.Linear, Conv1D))
    }
    head = model.get_output_embeddings()
    if not is_tied(model):
        names |= {n.rpartition(".")[2] for n, part in model.named_modules() if part is head}
    return tuple(sorted(names))


def adapter_size(model: Any, rank: int) -> int:
    """Parameters of an adapter of this rank; the model's own weights may be packed."""
    names, size = linear_names(model), 0
    for name, part in model.named_modules():
        if name.rpartition(".")[2] in names:
            is_linear = isinstance(part, nn.Linear)
            size += sum((part.in_features, part.out_features) if is_linear else part.weight.shape)
    return rank * size


def is_tied(model: Any) -> bool:
    """Whether the LM head and the embeddings are one tensor."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def set_dropout(model: Any, is_on: bool) -> None:
    """Switch the adapter's dropout until the next call; the backbone's own is always off."""
    model.eval()
    for name, part in model.named_modules():
        if name.endswith("lora_dropout"):
            part.train(is_on)
