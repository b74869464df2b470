"""`medusa-chat bench`: what is asked of it, checked before a model is loaded; and where it goes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from medusa_chat import paths
from medusa_chat.cli.options import AsJson, TreeName, load_options, refuse_unknown_tree, takes
from medusa_chat.cli.terminal import progress, refusing, require_folder
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest

if TYPE_CHECKING:
    from medusa_chat.bench import Report

MEASURED = "steps, speed, bandwidth, turns, text, load, context, elsewhere"
FINDINGS = (
    "Of the paper, only where named: ladder, trees, thresholds, temperatures, categories, "
    "hardware, assisted, reference, heads, two-stage, report"
)


@dataclass(frozen=True)
class ReportWish:
    """What is asked of the report: its page, FastChat's answers, whose they are, and how they are
    decoded."""

    page: Path | None
    answers: Path | None
    model_id: str | None
    acceptance: str
    temperature: float


def report_options(
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
) -> ReportWish:
    """The options of `--study report`."""
    return ReportWish(report, answers, model_id, acceptance, temperature)


@dataclass(frozen=True)
class StudyFiles:
    """What the studies read: questions, conversations, and what is measured beside the model."""

    prompts: Path | None
    draft: Path | None
    data: Path | None
    reference: Path | None
    medusa_2: Path | None


def file_options(
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
) -> StudyFiles:
    """The options that name what a study reads."""
    return StudyFiles(prompts, draft, data, reference, medusa_2)


@takes(wish=report_options, request=load_options, files=file_options)
def bench(
    request: LoadRequest,
    wish: ReportWish,
    files: StudyFiles,
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
    as_json: AsJson = False,
    output: Annotated[Path | None, Option(metavar="FILE", help="Write the JSON here too.")] = None,
    picture: Annotated[Path | None, Option(metavar="FILE.svg", help="Draw the rows there.")] = None,
) -> None:
    """Measure Medusa against plain decoding and transformers' generate on this machine."""
    refuse_unknown_tree(tree)
    for file in (output, picture, wish.page, wish.answers):
        if file is not None:
            require_folder(file)
    studies = tuple(study or ())
    _refuse_misplaced(shape, (layers, trace), "report" in studies, wish)
    settings = GenerationSettings(acceptance=wish.acceptance, temperature=wish.temperature)
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
            prompts=files.prompts,
            draft=files.draft,
            data=files.data,
            reference=files.reference,
            medusa_2=files.medusa_2,
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
    print(json.dumps(result, indent=2) if as_json else table(result))
    _keep(result, output, picture)
    if told is not None:
        _tell(result, told, wish)


def _refuse_misplaced(
    shape: str | None, of_shape: tuple[Any, ...], reports: bool, wish: ReportWish
) -> None:
    """Refuse options that nothing here would read."""
    if shape not in (None, "7b", "8b"):
        raise UsageError(f"shape is {shape!r}: choose 7b or 8b")
    if shape is None and any(value is not None for value in of_shape):
        raise UsageError("--layers and --trace are for --shape")
    if reports:
        return
    if any(value is not None for value in (wish.page, wish.answers, wish.model_id)):
        raise UsageError("--report, --answers and --model-id are for --study report")
    if (wish.acceptance, wish.temperature) != ("exact", 0.0):
        raise UsageError("--acceptance and --temperature are for --study report")


def _report() -> "Report":
    from medusa_chat.bench import Report

    return Report()


def _keep(result: dict[str, Any], output: Path | None, picture: Path | None) -> None:
    """Write what --output and --picture name."""
    _write(output, json.dumps(result, indent=2) + "\n")
    if picture is not None:
        from medusa_chat.bench import chart_svg

        _write(picture, chart_svg(result))


def _tell(result: dict[str, Any], told: "Report", wish: ReportWish) -> None:
    """Write what --report and --answers name."""
    from medusa_chat.bench import model_answers, report_html

    if wish.page is not None:
        _write(wish.page, report_html(result, told))
    if wish.answers is not None:
        name = Path(result["machine"]["model"].partition(", ")[0]).name
        _write(wish.answers, model_answers(told, wish.model_id or f"{name}-medusa"))


def _write(file: Path | None, text: str) -> None:
    if file is not None:
        with refusing(file):
            paths.write_text(file, text)
