"""Rows about answers: tokens a step, speed, and how probable their texts are."""

from collections.abc import Sequence
from math import fsum

import torch

from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.report_data import Run
from medusa_chat.bench.harness.rows import Row, row
from medusa_chat.training.accuracy import states_of


def per_step(name: str, runs: Sequence[Run], note: str = "") -> Row:
    """Tokens a step over all answers; the minimum and the maximum are of single answers."""
    mean = fsum(run.stepped for run in runs) / sum(run.steps for run in runs)
    return row(name, [run.per_step for run in runs], "tokens/step", note=note, value=mean)


def speed(name: str, runs: Sequence[Run], baseline: Sequence[Run], against: str = "plain") -> Row:
    """Tokens a second, and the ratio to the baseline's on the same questions. against: the name of
    the baseline."""
    rates = {id(run.question): run.rate for run in baseline}
    pairs = [(run.rate, rates[id(run.question)]) for run in runs if id(run.question) in rates]
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    return row(name, ours, "tokens/s", against, theirs)


def likelihood(context: BenchContext, runs: Sequence[Run]) -> list[float]:
    """For each answer the mean log-probability of its tokens under the backbone at temperature 1,
    in nats."""
    engine = context.loaded.engine
    found = []
    with torch.inference_mode():
        for run in runs:
            if not run.tokens:
                continue
            first = len(run.question.ids)
            ids = torch.tensor([*run.question.ids, *run.tokens], device=engine.backbone.device)
            logits = engine.backbone.lm_head(states_of(engine, ids)[first - 1 : -1]).float()
            chosen = logits.log_softmax(-1).gather(1, ids[first:, None])
            found.append(float(chosen.mean()))
    return found
