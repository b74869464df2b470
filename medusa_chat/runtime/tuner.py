"""tune(): time the steps of a loaded model, and choose the tree behind `--tree auto` by them."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter

from medusa_chat.checkpoints.load import tuning_key
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.continuation import DEPTH
from medusa_chat.decoding.draft import PromptLookup
from medusa_chat.decoding.draft_budget import DraftBudget
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import ModelInfo
from medusa_chat.runtime.step_profiler import Clock, time_steps
from medusa_chat.trees.auto_tree import candidates, rank_accuracies, source_tree, tree_facts
from medusa_chat.trees.expected_length import expected_lengths
from medusa_chat.trees.tuning_store import Tuning, write

SECONDS = 1.0
CHAIN = Tree((-1, *range(DEPTH)), (-1, *[0] * DEPTH))  # of the text


def tune(
    loaded: LoadedModel, budget: float = SECONDS, clock: Clock = perf_counter
) -> Generator[Tuning | None, None, None]:
    """Time steps for about `budget` seconds and apply the result. Yields None after each step, so
    that the caller can close the iterator in between, and the Tuning at the end; nothing for a
    model whose times nothing reads."""
    if not _is_tunable(loaded):
        return
    heads = loaded.info.heads
    source = source_tree(loaded.calibration, heads) if heads else CHAIN
    with closing(time_steps(loaded.engine, source, budget, clock)) as steps:
        for costs in steps:
            yield None if costs is None else _applied(loaded, costs)


def tune_unless_known(
    loaded: LoadedModel, should_stop: Callable[[], bool], again: bool = False
) -> Iterator[ModelInfo]:
    """Time the steps of a model, unless the times are known; with `again` also then. Yields the
    model as it is afterwards, nothing when it was stopped."""
    if not _is_tunable(loaded) or (loaded.tuned is not None and not again):
        yield loaded.info
        return
    with closing(tune(loaded)) as steps:  # closed, it puts everything back
        for tuning in steps:
            if tuning is not None:
                yield loaded.info
            elif should_stop():
                return


def _is_tunable(loaded: LoadedModel) -> bool:
    """Whether something reads the times: not of the text's chains in recorded steps, which have
    one length."""
    return bool(loaded.info.heads) or not loaded.engine.backend.tries


def _applied(loaded: LoadedModel, costs: StepCosts) -> Tuning | None:
    info, device = loaded.info, loaded.engine.backbone.device
    place = tuning_key(info.name, info.backbone, info.precision, device)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    loaded.tuned = Tuning(place, info.parameters, costs, date)
    with suppress(OSError):  # a disk that is full or read-only: the next load measures again
        write(loaded.tuned)
    _choose_tree(loaded)
    return loaded.tuned


def _choose_tree(loaded: LoadedModel) -> None:
    """Choose the auto tree by the calibration and the tuning that the model has now."""
    loaded.trees.clear()
    tree, why = loaded.auto_tree()
    loaded.budgets.clear()
    info = loaded.info
    facts = tree_facts(info.heads, loaded.calibration, loaded.tuned)
    loaded.info = replace(info, nodes=len(tree), tree_reason=why, tree_facts=facts)


def draft_budget(loaded: LoadedModel, drafter: str) -> DraftBudget | None:
    """What decides how many nodes each step of a drafter drafts, of the heads by the auto tree;
    None where the costs were not measured, and for chains of one length."""
    is_fixed = drafter == PromptLookup.name and loaded.engine.backend.tries > 0
    if loaded.tuned is None or is_fixed:
        return None
    if drafter not in loaded.budgets:
        costs, by_text = loaded.tuned.costs, (1.0,)
        known = (by_text, None) if drafter == PromptLookup.name else _by_heads(loaded)
        loaded.budgets[drafter] = DraftBudget(costs, *known)
    return loaded.budgets[drafter]


def _by_heads(loaded: LoadedModel) -> tuple[tuple[float, ...], Tree | None]:
    """DraftBudget's expected tokens and candidates for the auto tree."""
    tree, _ = loaded.auto_tree()
    device, calibration = loaded.engine.backbone.device, loaded.calibration
    found = candidates(calibration, loaded.info.heads, device, tree)
    return expected_lengths(tree, rank_accuracies(calibration)), found
