"""Medusa-2: the backbone, by LoRA, and its heads trained together, resumable at any step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import pi, sin
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.data import Batch, Example, collate, grouped
from medusa_chat.training.loss import (
    IGNORED,
    HeadLosses,
    LMHead,
    medusa_loss,
    run_decoder,
    targets_of,
)
from medusa_chat.training.optimizers import Optimizers, adamw
from medusa_chat.training.team import ALONE, Team
from medusa_chat.training.trainer import (
    Evaluated,
    HeadRecipe,
    TrainStep,
    batch_of,
    descend,
    is_due,
    optimizers_of,
    shares,
    streamed,
    write_state,
)


@dataclass(frozen=True)
class JointRecipe:
    """Settings of a Medusa-2 run. heads: those of the heads, and steps, batches and seed.

    learning_rate: the adapter's. lambda0: the weight of the heads' loss beside the backbone's,
    from the first step, or with schedule "sine" lambda0 x sin(pi/2 x step/steps). distill: the
    backbone's loss is KL(itself without adapter || itself), else the cross-entropy of the data
    (Medusa, arXiv 2401.10774, 2.2.2 and 2.3.2).
    """

    heads: HeadRecipe
    learning_rate: float = 1e-4
    lambda0: float = 0.2
    schedule: str = "constant"
    distill: bool = False
    rank: int = 32
    alpha: int = 16
    dropout: float = 0.05


def add_adapter(model: Any, recipe: JointRecipe) -> tuple[Any, tuple[str, ...]]:
    """The model with a fresh LoRA on every linear layer and the LM head; and their names.

    An LM head that is tied to the embeddings is left out: a change of it would change both.
    """
    from peft import LoraConfig, get_peft_model

    names = linear_names(model)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=recipe.dropout,
        target_modules=list(names),
    )
    torch.manual_seed(recipe.heads.seed)
    return get_peft_model(model.requires_grad_(False), config), names


def linear_names(model: Any) -> tuple[str, ...]:
    """Last names of the decoder's linear layers, and of the LM head where it is not tied."""
    from transformers.pytorch_utils import Conv1D

    found = {
        name.rpartition(".")[2]
        for name, part in model.get_decoder().named_modules()
        if isinstance(part, (nn.Linear, Conv1D))
    }
    head = model.get_output_embeddings()
    if not is_tied(model):
        found |= {n.rpartition(".")[2] for n, part in model.named_modules() if part is head}
    return tuple(sorted(found))


def is_tied(model: Any) -> bool:
    """Whether the LM head is the embeddings."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def weight_of_heads(step: int, recipe: JointRecipe) -> float:
    """lambda_0 at a step from 0."""
    if recipe.schedule == "constant":
        return recipe.lambda0
    return recipe.lambda0 * sin(pi / 2 * (step + 1) / recipe.heads.steps)


def train_jointly(
    model: Any,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: JointRecipe,
    held_out: Sequence[Example] = (),
    state: Path | None = None,
    team: Team = ALONE,
) -> Iterator[TrainStep | Evaluated]:
    """Train the adapter of `model` (see add_adapter) and `heads` in place; as train_heads."""
    if not examples:
        raise UsageError("no examples to train on")
    heads.requires_grad_(True)
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizers = [adamw(adapter, recipe.learning_rate, 0.0), *optimizers_of(heads, recipe.heads)]
    start = _restore(state, model, heads, optimizers, recipe)

    def save(done: int) -> None:
        if state is not None and team.is_first:
            write_state(
                state,
                {
                    "heads": heads.state_dict(),
                    "adapter": adapter_tensors(model),
                    "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers],
                    "step": done,
                    "recipe": asdict(recipe),
                },
            )

    def loss(step: int, rows: Sequence[Sequence[Example]]) -> HeadLosses:
        torch.manual_seed(recipe.heads.seed + 7919 * step + team.rank)  # for the dropout
        weight = weight_of_heads(step, recipe)
        return joint_loss(model, heads, rows, recipe, weight, team, dropout=True)

    source = streamed(examples, recipe.heads, start, team)
    parameters = [*adapter, *heads.parameters()]
    blame = _blame(model, heads, recipe)
    for event in descend(source, loss, blame, parameters, optimizers, recipe.heads, save, team):
        yield event
        if held_out and is_due(event.step, recipe.heads.evaluate_every, recipe.heads.steps):
            yield evaluate_jointly(model, heads, held_out, recipe, event.step)


def _set_dropout(model: Any, is_on: bool) -> None:
    """The adapter's dropout on or off, the backbone's own always off. It stays until the next
    call: the backward pass runs parts of the forward pass again."""
    model.eval()
    for name, part in model.named_modules():
        if name.endswith("lora_dropout"):
            part.train(is_on)


def joint_loss(
    model: Any,
    heads: MedusaHeads,
    rows: Sequence[Sequence[Example]],
    recipe: JointRecipe,
    weight: float,
    team: Team = ALONE,
    dropout: bool = False,
) -> HeadLosses:
    """L_LM + weight x L_Medusa-1 over this process' rows, means over all processes' labels."""
    base = model.get_base_model()
    device, at_once = base.get_input_embeddings().weight.device, recipe.heads.rows_at_once
    if not rows:  # another process has this batch's rows
        return _nothing(heads, model, device, team)
    batch = batch_of(rows, recipe.heads)
    nexts = next_tokens(batch).to(device)
    targets = targets_of(batch.ids.to(device), batch.is_label.to(device), len(heads))
    chosen = nexts != IGNORED
    count = team.sum(chosen.sum()).clamp(min=1)
    lm_head = LogitHead(base.get_output_embeddings(), base.config.get_text_config())
    taught = _teacher(model, batch, chosen) if recipe.distill else None
    _set_dropout(model, dropout)
    hidden = run_decoder(base, batch)
    wanted = nexts[chosen] if taught is None else taught
    lm_sum = _lm_sum(lm_head, hidden[chosen], wanted, at_once, _teacher_head(base))
    asked = (targets != IGNORED).any(-1)
    labels = team.sum((targets != IGNORED).sum((0, 1)))
    medusa = medusa_loss(
        heads, lm_head, hidden[asked], targets[asked], recipe.heads.decay, at_once, labels
    )
    lm = lm_sum / count
    return replace(medusa, total=lm + weight * medusa.total, lm=lm.detach())


def _nothing(heads: MedusaHeads, model: Any, device: torch.device, team: Team) -> HeadLosses:
    zero = sum(p.sum() * 0.0 for p in (*heads.parameters(), *model.parameters()) if p.requires_grad)
    team.sum(torch.zeros((), dtype=torch.long, device=device))
    labels = team.sum(torch.zeros(len(heads), dtype=torch.long, device=device))
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
    _set_dropout(model, False)
    with model.disable_adapter():
        return run_decoder(model.get_base_model(), batch)[chosen]


def _teacher_head(base: Any) -> LMHead:
    """The LM head as it was."""
    linear = base.get_output_embeddings()
    return LogitHead(getattr(linear, "base_layer", linear), base.config.get_text_config())


def _lm_sum(
    lm_head: LMHead, hidden: Tensor, wanted: Tensor, at_once: int, teacher: LMHead
) -> Tensor:
    """Summed loss of the backbone: cross-entropy with token ids [n], or KL with the teacher's
    hidden states [n, d]. Logits of at most `at_once` rows exist at a time."""

    def part(rows: Tensor, goal: Tensor) -> Tensor:
        logits = lm_head(rows).float()
        if not goal.is_floating_point():
            return F.cross_entropy(logits, goal, reduction="sum")
        with torch.no_grad():
            told = teacher(goal).float().log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), told, log_target=True, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, goal in zip(hidden.split(at_once), wanted.split(at_once), strict=True):
        total = total + checkpoint(part, rows, goal, use_reentrant=False)
    return total


@torch.no_grad()
def evaluate_jointly(
    model: Any, heads: MedusaHeads, examples: Sequence[Example], recipe: JointRecipe, step: int
) -> Evaluated:
    """Losses of the backbone and of every head over the examples, each over its own labels."""
    plain = replace(recipe, heads=replace(recipe.heads, sequence_length=0))
    groups = grouped(examples, recipe.heads.batch_tokens, recipe.heads.seed)
    results = [joint_loss(model, heads, [[e] for e in group], plain, 1.0) for group in groups]
    counts = [int((next_tokens(collate(group)) != IGNORED).sum()) for group in groups]
    labels = torch.stack([r.labels for r in results]).sum(0)
    sums = torch.stack([r.losses * r.labels for r in results]).sum(0)
    hits = torch.stack([r.hits for r in results]).sum(0)
    lm = sum(float(r.lm or 0.0) * n for r, n in zip(results, counts, strict=True))
    losses = tuple((sums / labels.clamp(min=1)).tolist())
    return Evaluated(step, losses, shares(hits, labels), lm / max(sum(counts), 1))


def _blame(model: Any, heads: MedusaHeads, recipe: JointRecipe) -> Callable[[int, Any], str]:
    @torch.no_grad()
    def blame(step: int, rows: Sequence[Sequence[Example]]) -> str:
        """Which examples have a loss that is not finite by itself."""
        plain = replace(recipe, heads=replace(recipe.heads, sequence_length=0))
        guilty = [
            example.place or "an example without a name"
            for row in rows
            for example in row
            if not joint_loss(model, heads, [[example]], plain, 1.0).total.isfinite()
        ]
        names = ", ".join(guilty[:3]) or "none of the batch's rows alone"
        where = f"the loss is not finite at step {step + 1}"
        return f"{where}: look at {names}, or lower the learning rate"

    return blame


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapter's weights under peft's names."""
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def _restore(
    path: Path | None, model: Any, heads: MedusaHeads, optimizers: Optimizers, recipe: JointRecipe
) -> int:
    """Steps done by the state at `path`, which is loaded; 0 without one. Raises UsageError."""
    from peft import set_peft_model_state_dict

    if path is None or not path.exists():
        return 0
    saved = torch.load(path, weights_only=True, map_location=heads.weight.device)
    if saved["recipe"] != asdict(recipe):
        raise UsageError(f"{path} belongs to another recipe: remove it or give another file")
    heads.load_state_dict(saved["heads"])
    set_peft_model_state_dict(model, saved["adapter"])
    for (optimizer, _), values in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return int(saved["step"])
