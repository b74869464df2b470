"""The acceptance of a recorded answer combined with the step times of this model."""

import json
from pathlib import Path
from statistics import fmean

from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.rows import Row, row
from medusa_chat.decoding.events import Finished, Step
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.errors import UsageError
from medusa_chat.runtime.trace_line import from_json


def from_trace(context: BenchContext, file: str) -> list[Row]:
    """The speedup of the recorded steps at this model's step times. file: from `generate --trace`.
    Raises UsageError for another file, and where the step times were not measured."""
    steps = _steps(file)
    tuned = context.loaded.tuned
    if tuned is None:
        raise UsageError("--trace needs the study steps: omit --study, or add --study steps")
    length = tuned.costs.lengths[0]
    emitted = sum(max(len(step.path), 1) for step in steps)
    nodes = fmean(step.nodes for step in steps)
    usual = max(context.loaded.info.nodes, 2)
    spent = sum(_seconds(step, tuned.costs, usual, length) for step in steps)
    speedup = emitted * tuned.costs.at(1, length) / spent
    note = f"RECORDED acceptance: {emitted / len(steps):.2f} tokens a step in {Path(file).name}"
    note += f", {nodes:.0f} nodes; only the step times are this model's"
    command = f"medusa-chat bench --shape --trace {Path(file).name}"
    return [row("medusa / plain, recorded", [speedup], "x", command, "plain", [1.0], note)]


def _steps(file: str) -> list[Step]:
    try:
        lines = Path(file).read_text("utf-8").splitlines()
        events = [from_json(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"trace {file}: {str(error)[:120]}") from None
    steps = [event for event in events if isinstance(event, Step)]
    if not steps or not any(isinstance(event, Finished) for event in events):
        raise UsageError(f"trace {file} has no finished answer: write one with generate --trace")
    return steps


def _seconds(step: Step, costs: StepCosts, drafted: int, length: int) -> float:
    """Seconds of such a step on this model. A step that ran the heads pays for the whole draft,
    even where only a part of it was verified."""
    nodes = step.nodes
    if step.draft is not None and step.draft.guesses:
        return costs.drafted(drafted, max(nodes, drafted), length)[nodes - 1]
    return costs.at(nodes, length)
