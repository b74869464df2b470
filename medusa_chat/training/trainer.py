"""Training of the heads, resumable at any step: the optimizers, a stage's state and its steps.

`train_heads` is Medusa-1, on a frozen backbone; Medusa-2 (`joint.py`) takes the same steps.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from medusa_chat import paths
from medusa_chat.checkpoints.devices import has_fast_bf16
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, UsageError, first_line
from medusa_chat.training.events import Evaluated, HiddenStates, TrainStep
from medusa_chat.training.examples import Example, collate, group_by_length
from medusa_chat.training.loss import (
    HeadInputs,
    HeadLosses,
    LMHead,
    ShortVocabulary,
    caching_inputs,
    draw_inputs,
    evaluate,
    head_inputs,
    medusa_loss,
    top_shares,
)
from medusa_chat.training.packed_model import for_loss
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.recipe import Recipe

T = TypeVar("T")
INPUTS = "inputs.safetensors"
CLIP = 1.0  # largest norm of the gradients
MOMENTUM = 0.95  # of Muon
Optimizers = list[tuple[torch.optim.Optimizer, float]]  # each with its peak learning rate


# ---------------------------------------------------------------------------------------- Medusa-1


def new_heads(
    lm_head: nn.Linear,
    heads: int,
    layers: int = 1,
    own_lm_head: bool = False,
    embedding: nn.Module | None = None,
) -> MedusaHeads:
    """Heads in fp32 that predict what the LM head predicts, on its device. own_lm_head: each head
    has a copy of the LM head; otherwise all share it. embedding: the backbone's, for heads that
    read the root.

    Raises UsageError for copies of an LM head with a bias: the file format cannot hold the bias.
    """
    if own_lm_head and lm_head.bias is not None:
        raise UsageError(
            "the backbone's LM head has a bias, which copies of it cannot keep: use "
            "--shared-lm-head"
        )
    vocabulary, hidden = lm_head.weight.shape
    rows = vocabulary if own_lm_head else None
    made = MedusaHeads(heads, hidden, layers, rows, has_root=embedding is not None)
    if embedding is not None:
        made.read_roots(embedding)
    if made.lm_weight is not None:
        with torch.no_grad():
            made.lm_weight.copy_(lm_head.weight.expand_as(made.lm_weight))
    return made.to(lm_head.weight.device)


def train_heads(
    model: Any,
    lm_head: LMHead,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: Recipe,
    held_out: Sequence[Example] = (),
    state: Path | None = None,
    group: ProcessGroup = ALONE,
    cached: HeadInputs | None = None,
    short: ShortVocabulary | None = None,
) -> Iterator[HiddenStates | TrainStep | Evaluated]:
    """Train `heads` in place to recipe.steps; the backbone is frozen and stays frozen.

    state: a file written every save_every steps and when the generator is closed, from which a
    training continues, as are the cached inputs beside it (INPUTS); an interrupted training gives
    the same heads, bit for bit on a CPU. Several processes give the same heads as a single one that
    does not cache hidden states. cached: the examples' inputs, where the caller has run the
    backbone already. short: the vocabulary of the loss, in evaluations too. Raises
    MedusaChatError when a loss is not finite, and where a file cannot be written.
    """
    model.requires_grad_(False).eval()
    heads.requires_grad_(True)
    stage = StageState(heads, head_optimizers(heads, recipe), recipe, state)
    stage.restore()
    if recipe.cache and group.size == 1 and cached is None and stage.step < recipe.steps:
        kept = None if state is None else state.with_name(INPUTS)
        cached = yield from caching_inputs(model, len(heads), examples, recipe, kept)
    if cached is not None:
        batches = draw_inputs(cached, recipe, stage.step)
    else:
        streamed = stream_batches(examples, recipe, stage.step, group)
        batches = ((step, head_inputs(model, collate(rows), len(heads))) for step, rows in streamed)

    def loss(step: int, inputs: HeadInputs, group: ProcessGroup = group) -> HeadLosses:
        inputs = inputs._replace(hidden=for_loss(model, inputs.hidden))
        if short is None:
            return medusa_loss(heads, lm_head, inputs, recipe.decay, group=group)
        inputs = inputs._replace(targets=short.columns(inputs.targets))
        return medusa_loss(heads, short.lm_head, inputs, recipe.decay, group=group)

    held = dict[tuple[tuple[int, ...], ...], HeadInputs]()  # by the texts of a batch

    def held_out_loss(rows: Sequence[Example]) -> HeadLosses:
        texts = tuple(row.ids for row in rows)
        inputs = held.get(texts) or head_inputs(model, collate(rows), len(heads))
        if recipe.cache:
            held[texts] = inputs
        return loss(0, inputs, ALONE)

    evaluation = partial(evaluate, held_out_loss, held_out, recipe) if held_out else None
    yield from run_steps(batches, loss, stage, evaluation, group)


def stream_batches(
    examples: Sequence[Example], recipe: Recipe, start: int, group: ProcessGroup
) -> Iterator[tuple[int, Sequence[Example]]]:
    """(step, this process's rows of the batch) from step `start` on. A process without any runs
    the first row without its labels, so that it takes part in every sum."""
    step = 0
    for epoch in range(recipe.steps if start < recipe.steps else 0):
        for rows in group_by_length(examples, recipe.batch_tokens, recipe.seed + epoch):
            if step >= recipe.steps:
                return
            if step >= start:
                own = group.share(rows)
                yield step, own or [replace(rows[0], is_label=(False,) * len(rows[0].ids))]
            step += 1


# ----------------------------------------------------------------------------- a stage's state


@dataclass
class StageState:
    """What one stage trains, and the file of its state; None: it is not saved. wrapped: the peft
    model whose adapter is trained too (Medusa-2). step: the number of steps done."""

    heads: MedusaHeads
    optimizers: Optimizers
    recipe: Recipe
    file: Path | None = None
    wrapped: Any = None
    step: int = 0
    saved_step: int = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that is trained."""
        groups = (group for optimizer, _ in self.optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    def restore(self) -> None:
        """Continue from the file, if there is one. Raises UsageError for the state of another
        recipe."""
        if self.file is None or not self.file.exists():
            return
        device = self.heads.weight.device
        saved: dict[str, Any] = torch.load(self.file, weights_only=True, map_location=device)
        if saved["recipe"] != asdict(self.recipe):
            raise UsageError(
                f"{self.file} belongs to another recipe or version: remove it, or use the same "
                "options"
            )
        self.heads.load_state_dict(saved["heads"])
        for (optimizer, _), values in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        if self.wrapped is not None:
            load_adapter(self.wrapped, saved["adapter"])
        self.step = self.saved_step = int(saved["step"])

    def save(self) -> None:
        """Write the file, if there were steps since the last time. Raises MedusaChatError."""
        if self.file is None or self.saved_step == self.step:
            return
        saved = {
            "heads": self.heads.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "step": self.step,
            "recipe": asdict(self.recipe),
        }
        if self.wrapped is not None:
            saved["adapter"] = adapter_tensors(self.wrapped)
        write_state(self.file, saved)
        self.saved_step = self.step


def write_state(path: Path, saved: dict[str, Any]) -> None:
    """Write a new file beside `path` and replace `path` with it. Raises MedusaChatError where that
    fails, and leaves the old file."""
    partial = path.with_suffix(".part")
    try:
        torch.save(saved, partial)
        paths.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        partial.unlink(missing_ok=True)
        raise MedusaChatError(
            f"cannot write the training state to {path.parent} ({first_line(error)}): free some "
            "disk space and continue with --resume"
        ) from error


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapter's weights on the CPU in the dtype they were trained in (float32 over a backbone
    of half precision), by peft's names: of each linear [out, in] `...lora_A.weight` [r, in] and
    `...lora_B.weight` [out, r]."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def load_adapter(model: Any, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of adapter_tensors into the adapter."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, tensors)


# ------------------------------------------------------------------------------------- the steps


def run_steps(
    batches: Iterator[tuple[int, T]],
    loss: Callable[[int, T], HeadLosses],
    stage: StageState,
    evaluate: Callable[[int], Evaluated] | None,
    group: ProcessGroup,
) -> Iterator[TrainStep | Evaluated]:
    """One optimizer step for each (step, batch). The first process saves the state every save_every
    steps, and when the generator is closed between two steps. evaluate(steps done): called every
    evaluate_every steps. Raises MedusaChatError when the loss is not finite."""
    recipe, parameters = stage.recipe, stage.parameters
    try:
        for step, batch in batches:
            share = share_of_peak(step, recipe.steps, recipe.warmup_steps)
            result = loss(step, batch)
            total = group.sum(result.total.detach().clone()).item()
            if not math.isfinite(total):
                raise MedusaChatError(
                    f"the loss is not finite at step {step + 1}: lower --learning-rate, or use "
                    "another --precision or --backbone"
                )
            result.total.backward()
            _sum_gradients(parameters, group)
            _update(parameters, stage.optimizers, share)
            stage.step = done = step + 1
            if group.is_first and is_due(done, recipe.save_every, recipe.steps):
                stage.save()
            rate = share * recipe.head_learning_rate
            yield _train_step(done, recipe.steps, result, total, rate, group)
            if evaluate is not None and is_due(done, recipe.evaluate_every, recipe.steps):
                yield evaluate(done)
    except GeneratorExit:
        if group.is_first:
            stage.save()
        raise


def is_due(done: int, every: int, steps: int) -> bool:
    """Whether what happens every `every` steps, and after the last, is due."""
    return done % every == 0 or done == steps


def share_of_peak(step: int, steps: int, warmup: int) -> float:
    """Share of the peak learning rate at a step from 0: linear warmup, then a half cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _sum_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    """Sum the gradients over all processes. Every process takes part in every sum, also where it
    has no gradient of its own."""
    if group.size == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        group.sum(parameter.grad)


def _update(parameters: Sequence[nn.Parameter], optimizers: Optimizers, share: float) -> None:
    """One step of every optimizer at a share of its peak learning rate."""
    nn.utils.clip_grad_norm_(parameters, CLIP)
    for optimizer, peak in optimizers:
        for param_group in optimizer.param_groups:
            param_group["lr"] = peak * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _train_step(
    step: int, steps: int, result: HeadLosses, total: float, rate: float, group: ProcessGroup
) -> TrainStep:
    losses = tuple(group.sum(result.losses.clone()).tolist())
    top = top_shares(group.sum(result.hits), result.labels)
    lm = None if result.lm is None else group.sum(result.lm.clone()).item()
    return TrainStep(step, steps, total, losses, top, int(result.labels[0]), rate, lm)


# ---------------------------------------------------------------------------------- the optimizers


def head_optimizers(heads: MedusaHeads, recipe: Recipe) -> Optimizers:
    """The recipe's optimizers of the heads: with Muon that one is for the matrices of the layers
    and of the root, and AdamW for all other parameters."""
    rate, decay = recipe.head_learning_rate, recipe.weight_decay
    if recipe.optimizer == "adamw":
        return [adamw(heads.parameters(), rate, decay)]
    matrices = [p for p in (heads.weight, heads.root_weight) if p is not None]
    rest = [p for p in heads.parameters() if all(p is not one for one in matrices)]
    return [(Muon(matrices, rate, decay), rate), adamw(rest, rate / 10, decay)]


def adamw(
    parameters: Iterable[nn.Parameter], rate: float, decay: float
) -> tuple[torch.optim.Optimizer, float]:
    """AdamW and its peak learning rate; on CUDA the 8-bit AdamW of bitsandbytes, whose state takes
    a quarter of the memory."""
    chosen = list(parameters)
    if chosen and chosen[0].is_cuda:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(chosen, lr=rate, weight_decay=decay), rate
    return torch.optim.AdamW(chosen, lr=rate, weight_decay=decay), rate


class Muon(torch.optim.Optimizer):
    """Momentum with an update that five Newton-Schulz steps orthogonalise (Jordan 2024).

    Parameters are [..., n, m]: each matrix of the last two dimensions has its own update. Unlike
    torch.optim.Muon, which computes in bf16 and takes single matrices, this one computes in fp32
    where bf16 is slower: on a CPU that does not multiply it itself.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": MOMENTUM, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("momentum", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(average, group["momentum"]))
                scale = group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:]))
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def orthogonal(x: Tensor) -> Tensor:
    """x [..., n, m] -> [..., n, m] of the same dtype: roughly the nearest (semi-)orthogonal matrix
    to each."""
    is_fast = x.is_cuda or has_fast_bf16()
    y = x.reshape(-1, *x.shape[-2:]).to(torch.bfloat16 if is_fast else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    y = y.mT if is_tall else y
    y = y / (torch.linalg.matrix_norm(y, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        square = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        y = torch.baddbmm(y, square, y, beta=3.4445)
    return (y.mT if is_tall else y).to(x.dtype).view_as(x)
