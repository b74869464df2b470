"""run() and run_shape(): the chosen studies, one after another, on one loaded model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from medusa_chat.bench.answers import questions
from medusa_chat.bench.context import PROMPTS, BenchContext, machine, read_model
from medusa_chat.bench.drafters import drafters
from medusa_chat.bench.exactness import exactness
from medusa_chat.bench.load import memory_and_load, turns
from medusa_chat.bench.random_model import SHAPES, RandomModel, load_shape
from medusa_chat.bench.rows import Row, unmeasured
from medusa_chat.bench.speed import race
from medusa_chat.bench.steps import contexts, node_counts
from medusa_chat.bench.vllm import programs
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest

Study = Callable[[BenchContext], Iterator[Row]]


STUDIES: dict[str, Study] = {
    "steps": node_counts,
    "speed": race,
    "turns": turns,
    "load": memory_and_load,
    "context": contexts,
}
NAMED: dict[str, Study] = {  # run only where they are named: they need files or hours
    "drafters": drafters,
    "vllm": programs,
    "exactness": exactness,
}
ALONE = ("peers",)  # loads GGUF files anew (peers.py)
OF_SHAPES = ("steps", "turns", "context")


def run(
    request: LoadRequest,
    *,
    rounds: int,
    max_new_tokens: int,
    tree: str,
    progress: Callable[[str], None],
    studies: Sequence[str] = (),
    **inputs: Any,
) -> dict[str, Any]:
    """Measure a model. studies: names; without any, all of STUDIES. inputs: more fields of
    BenchContext. Returns {"machine", "rows", "verdict"}. Raises UsageError."""
    loaded = read_model(request, progress)
    context = BenchContext(request, loaded, tree, rounds, max_new_tokens, progress, **inputs)
    chosen = _chosen(studies or tuple(STUDIES), (*STUDIES, *NAMED))
    rows = [row for name in chosen for row in _rows(name, context)]
    return result_of(context, _prompt_count(context, chosen), rows)


def _prompt_count(context: BenchContext, studies: Sequence[str]) -> int:
    """The number of prompts answered: of the file, else those of the study "speed"."""
    if set(studies) & set(NAMED):
        return len(questions(context))
    return len(PROMPTS) if "speed" in studies else 0


def run_shape(
    shape: str | RandomModel,
    request: LoadRequest,
    *,
    rounds: int,
    progress: Callable[[str], None],
    layers: int | None = None,
    studies: Sequence[str] = (),
    budget: float = 1.0,
) -> dict[str, Any]:
    """Measure the step times of a model of random weights, which needs no download. Its text has no
    meaning, so acceptance comes from published accuracies, and the rows say so. layers: fewer than
    the shape has."""
    sizes = SHAPES[shape] if isinstance(shape, str) else shape
    sizes = sizes if layers is None else replace(sizes, layers=layers)
    progress(f"making random weights: {sizes.name}")
    context = BenchContext(request, load_shape(sizes, request), "auto", rounds, 1, progress, budget)
    chosen = _chosen(studies or OF_SHAPES, OF_SHAPES)
    rows = [row for name in chosen for row in _rows(name, context)]
    rows.append(
        unmeasured("end to end", "tokens/s", "the output of random weights is not worth timing")
    )
    return result_of(context, 0, rows)


def _rows(study: str, context: BenchContext) -> Iterator[Row]:
    """The rows of a study, with the command that measures them where they name none."""
    needs = " --prompts FILE" if study == "exactness" else ""
    for row in (STUDIES | NAMED)[study](context):
        is_named = row["command"] or row["value"] is None
        yield row if is_named else {**row, "command": f"medusa-chat bench --study {study}{needs}"}


def _chosen(studies: Sequence[str], allowed: Sequence[str]) -> list[str]:
    for name in studies:
        if name not in allowed:
            raise UsageError(f"study is {name!r}: choose one of {', '.join(allowed)}")
    return [name for name in allowed if not studies or name in studies]


def result_of(context: BenchContext, prompts: int, rows: list[Row]) -> dict[str, Any]:
    """The result to show and write; the verdict is what the default drafts with, and why."""
    info = context.loaded.info
    verdict = f"--tree auto: {info.tree_reason}." if info.heads else f"{info.name} has no heads."
    return {"machine": machine(context, prompts), "rows": rows, "verdict": verdict}
