"""`medusa-chat bench`: what is asked of it, checked before a model is loaded; and where it goes."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from medusa_chat import paths
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.options import AsJson, TreeName, load_options, refuse_unknown_tree, takes
from medusa_chat.terminal import progress, refusing, require_folder

if TYPE_CHECKING:
    from medusa_chat.bench import Report

MEASURED = "steps, speed, bandwidth, turns, text, load, context, elsewhere"
FINDINGS = (
    "Of the paper, only where named: ladder, trees, thresholds, temperatures, categories, "
    "hardware, assisted, reference, heads, two-stage, report"
)


@takes(request=load_options)
def bench(
    request: LoadRequest,
    tree: TreeName = "auto",
    rounds: Annotated[int, Option(min=1, metavar="N", help="Interleaved repeats.")] = 5,
    max_new_tokens: Annotated[int, Option(min=2, metavar="N", help="Tokens an answer.")] = 128,
    study: Annotated[
        list[str] | None,
        Option(metavar="NAME", help=f"Only this study; repeatable: {MEASURED}. {FINDINGS}."),
    ] = None,
    shape: Annotated[
        str | None, Option(metavar="7b|8b", help="Random weights of that shape, no checkpoint.")
    ] = None,
    layers: Annotated[
        int | None, Option(min=1, metavar="N", help="Of the shape: fewer layers than it has.")
    ] = None,
    trace: Annotated[
        Path | None, Option(metavar="FILE", help="For a shape: acceptance as recorded there.")
    ] = None,
    prompts: Annotated[
        Path | None,
        Option(metavar="FILE", help="Questions for the findings and the report, as MT-Bench's."),
    ] = None,
    draft: Annotated[
        Path | None, Option(metavar="DIR", help="A draft model of the same vocabulary.")
    ] = None,
    data: Annotated[
        Path | None, Option(metavar="FILE", help="Conversations for the studies that train.")
    ] = None,
    reference: Annotated[
        Path | None,
        Option(metavar="DIR", help="A checkout of FasterDecoding/Medusa, timed beside ours."),
    ] = None,
    medusa_2: Annotated[
        Path | None,
        Option(metavar="DIR", help="Of --study ladder: what train --method medusa-2 made."),
    ] = None,
    report: Annotated[
        Path | None, Option(metavar="FILE.html", help="Of --study report: the page.")
    ] = None,
    answers: Annotated[
        Path | None,
        Option(metavar="FILE.jsonl", help="Of --study report: the answers for FastChat's judges."),
    ] = None,
    model_id: Annotated[
        str | None, Option(metavar="NAME", help="Of --answers: whose they are.")
    ] = None,
    acceptance: Annotated[str, Option(metavar="NAME", help="Of --study report.")] = "exact",
    temperature: Annotated[float, Option(metavar="T", help="Of --study report: 0 to 2.")] = 0.0,
    as_json: AsJson = False,
    output: Annotated[Path | None, Option(metavar="FILE", help="Write the JSON here too.")] = None,
    picture: Annotated[Path | None, Option(metavar="FILE.svg", help="Draw the rows there.")] = None,
) -> None:
    """Measure Medusa against plain decoding and transformers' generate on this machine."""
    refuse_unknown_tree(tree)
    for file in (output, picture, report, answers):
        if file is not None:
            require_folder(file)
    studies = tuple(study or ())
    _refuse_misplaced(shape, (layers, trace), "report" in studies, (report, answers, model_id))
    if "report" not in studies and (acceptance, temperature) != ("exact", 0.0):
        raise UsageError("--acceptance and --temperature are for --study report")
    settings = GenerationSettings(acceptance=acceptance, temperature=temperature)
    from medusa_chat.bench import run, run_shape, table

    told = _report() if "report" in studies else None
    if shape is None:
        result = run(
            request,
            rounds=rounds,
            max_new_tokens=max_new_tokens,
            tree=tree,
            progress=progress,
            studies=studies,
            prompts=prompts,
            draft=draft,
            data=data,
            reference=reference,
            medusa_2=medusa_2,
            settings=settings,
            report=told,
        )
    else:
        result = run_shape(
            shape,
            request,
            rounds=rounds,
            progress=progress,
            layers=layers,
            trace=None if trace is None else str(trace),
            studies=studies,
        )
    text = json.dumps(result, indent=2)
    print(text if as_json else table(result))
    _write(output, text + "\n")
    if picture is not None:
        from medusa_chat.bench import drawing

        _write(picture, drawing(result))
    if told is not None:
        _tell(result, told, report, answers, model_id)


def _refuse_misplaced(
    shape: str | None, of_shape: tuple[Any, ...], reports: bool, of_report: tuple[Any, ...]
) -> None:
    """Refuse options that nothing here would read."""
    if shape not in (None, "7b", "8b"):
        raise UsageError(f"shape is {shape!r}: choose 7b or 8b")
    if shape is None and any(value is not None for value in of_shape):
        raise UsageError("--layers and --trace are for --shape")
    if not reports and any(value is not None for value in of_report):
        raise UsageError("--report, --answers and --model-id are for --study report")


def _report() -> "Report":
    from medusa_chat.bench import Report

    return Report()


def _tell(
    result: dict[str, Any],
    told: "Report",
    report: Path | None,
    answers: Path | None,
    model_id: str | None,
) -> None:
    """Write what --report and --answers name."""
    from medusa_chat.bench import model_answers, page

    if report is not None:
        _write(report, page(result, told))
    if answers is not None:
        name = Path(result["machine"]["model"].partition(", ")[0]).name
        _write(answers, model_answers(told, model_id or f"{name}-medusa"))


def _write(file: Path | None, text: str) -> None:
    if file is not None:
        with refusing(file):
            paths.write_text(file, text)
