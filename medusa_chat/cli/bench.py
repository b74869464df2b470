"""`medusa-chat bench`: its options are checked before a model is loaded; then it measures."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from medusa_chat import paths
from medusa_chat.cli.options import (
    AsJson,
    Backbone,
    Checkpoint,
    DataDir,
    Device,
    MaxContext,
    Offline,
    Precision,
    TreeName,
    load_request,
    refuse_unknown_tree,
)
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

Rounds = Annotated[int, Option(min=1, metavar="N", help="Interleaved repeats.")]
MaxNewTokens = Annotated[int, Option(min=2, metavar="N", help="Tokens an answer.")]
Study = Annotated[
    list[str] | None,
    Option(metavar="NAME", help=f"Only this study; repeatable: {MEASURED}. {FINDINGS}."),
]
Shape = Annotated[
    str | None, Option(metavar="7b|8b", help="Random weights of that shape, no checkpoint.")
]
Layers = Annotated[
    int | None, Option(min=1, metavar="N", help="Of the shape: fewer layers than it has.")
]
Trace = Annotated[
    Path | None, Option(metavar="FILE", help="For a shape: acceptance as recorded there.")
]
Output = Annotated[Path | None, Option(metavar="FILE", help="Write the JSON here too.")]
Picture = Annotated[Path | None, Option(metavar="FILE.svg", help="Draw the rows there.")]
ReportPage = Annotated[
    Path | None, Option(metavar="FILE.html", help="Of --study report: the page.")
]
Answers = Annotated[
    Path | None,
    Option(metavar="FILE.jsonl", help="Of --study report: the answers for FastChat's judges."),
]
ModelId = Annotated[str | None, Option(metavar="NAME", help="Of --answers: whose they are.")]
Acceptance = Annotated[str, Option(metavar="NAME", help="Of --study report.")]
Temperature = Annotated[float, Option(metavar="T", help="Of --study report: 0 to 2.")]
Prompts = Annotated[
    Path | None,
    Option(metavar="FILE", help="Questions for the findings and the report, as MT-Bench's."),
]
DraftModel = Annotated[
    Path | None, Option(metavar="DIR", help="A draft model of the same vocabulary.")
]
Data = Annotated[
    Path | None, Option(metavar="FILE", help="Conversations for the studies that train.")
]
Reference = Annotated[
    Path | None,
    Option(metavar="DIR", help="A checkout of FasterDecoding/Medusa, timed beside ours."),
]
Medusa2 = Annotated[
    Path | None,
    Option(metavar="DIR", help="Of --study ladder: what train --method medusa-2 made."),
]


@dataclass(frozen=True)
class ReportOptions:
    """Options of `--study report`. page, answers: the files to write; model_id: the name in
    `answers`; acceptance, temperature: how the answers are decoded."""

    page: Path | None
    answers: Path | None
    model_id: str | None
    acceptance: str
    temperature: float


@dataclass(frozen=True)
class BenchOptions:
    """What is measured. layers and trace belong to a shape; prompts to medusa_2: files and folders
    that studies read."""

    tree: str
    rounds: int
    max_new_tokens: int
    studies: tuple[str, ...]
    shape: str | None
    layers: int | None
    trace: Path | None
    prompts: Path | None
    draft: Path | None
    data: Path | None
    reference: Path | None
    medusa_2: Path | None


def bench(
    tree: TreeName = "auto",
    rounds: Rounds = 5,
    max_new_tokens: MaxNewTokens = 128,
    study: Study = None,
    shape: Shape = None,
    layers: Layers = None,
    trace: Trace = None,
    as_json: AsJson = False,
    output: Output = None,
    picture: Picture = None,
    report: ReportPage = None,
    answers: Answers = None,
    model_id: ModelId = None,
    acceptance: Acceptance = "exact",
    temperature: Temperature = 0.0,
    checkpoint: Checkpoint = "demo",
    backbone: Backbone = None,
    precision: Precision = "auto",
    device: Device = "auto",
    max_context: MaxContext = None,
    offline: Offline = False,
    data_dir: DataDir = None,
    prompts: Prompts = None,
    draft: DraftModel = None,
    data: Data = None,
    reference: Reference = None,
    medusa_2: Medusa2 = None,
) -> None:
    """Measure Medusa against plain decoding and transformers' generate on this machine."""
    request = load_request(checkpoint, backbone, precision, device, max_context, offline, data_dir)
    report_options = ReportOptions(report, answers, model_id, acceptance, temperature)
    options = BenchOptions(
        *(tree, rounds, max_new_tokens, tuple(study or ()), shape, layers, trace),
        *(prompts, draft, data, reference, medusa_2),
    )
    run_bench(request, options, report_options, as_json, output, picture)


def run_bench(
    request: LoadRequest,
    options: BenchOptions,
    report_options: ReportOptions,
    as_json: bool,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Check the options, measure, print the rows and write the files. Raises UsageError."""
    refuse_unknown_tree(options.tree)
    for file in (output, picture, report_options.page, report_options.answers):
        if file is not None:
            require_folder(file)
    _refuse_misplaced(options, report_options)
    settings = GenerationSettings(
        acceptance=report_options.acceptance, temperature=report_options.temperature
    )
    from medusa_chat.bench import table

    report = _new_report() if "report" in options.studies else None
    result = _measure(request, options, settings, report)
    print(json.dumps(result, indent=2) if as_json else table(result))
    _write_rows(result, output, picture)
    if report is not None:
        _write_report(result, report, report_options)


def _new_report() -> "Report":
    from medusa_chat.bench import Report

    return Report()


def _measure(
    request: LoadRequest,
    options: BenchOptions,
    settings: GenerationSettings,
    report: "Report | None",
) -> dict[str, Any]:
    """The rows, of a checkpoint or of a shape with random weights. report: filled in."""
    from medusa_chat.bench import run, run_shape

    if options.shape is not None:
        return run_shape(
            options.shape,
            request,
            rounds=options.rounds,
            progress=progress,
            layers=options.layers,
            trace=None if options.trace is None else str(options.trace),
            studies=options.studies,
        )
    return run(
        request,
        rounds=options.rounds,
        max_new_tokens=options.max_new_tokens,
        tree=options.tree,
        progress=progress,
        studies=options.studies,
        prompts=options.prompts,
        draft=options.draft,
        data=options.data,
        reference=options.reference,
        medusa_2=options.medusa_2,
        settings=settings,
        report=report,
    )


def _refuse_misplaced(options: BenchOptions, report: ReportOptions) -> None:
    """Refuse options that the studies asked for would not read."""
    if options.shape not in (None, "7b", "8b"):
        raise UsageError(f"shape is {options.shape!r}: choose 7b or 8b")
    if options.shape is None and (options.layers is not None or options.trace is not None):
        raise UsageError("--layers and --trace are for --shape")
    if "report" in options.studies:
        return
    if any(value is not None for value in (report.page, report.answers, report.model_id)):
        raise UsageError("--report, --answers and --model-id are for --study report")
    if (report.acceptance, report.temperature) != ("exact", 0.0):
        raise UsageError("--acceptance and --temperature are for --study report")


def _write_rows(result: dict[str, Any], output: Path | None, picture: Path | None) -> None:
    """Write what --output and --picture name."""
    _write(output, json.dumps(result, indent=2) + "\n")
    if picture is not None:
        from medusa_chat.bench import chart_svg

        _write(picture, chart_svg(result))


def _write_report(result: dict[str, Any], report: "Report", options: ReportOptions) -> None:
    """Write what --report and --answers name."""
    from medusa_chat.bench import model_answers, report_html

    if options.page is not None:
        _write(options.page, report_html(result, report))
    if options.answers is not None:
        name = Path(result["machine"]["model"].partition(", ")[0]).name
        _write(options.answers, model_answers(report, options.model_id or f"{name}-medusa"))


def _write(file: Path | None, text: str) -> None:
    if file is not None:
        with refusing(file):
            paths.write_text(file, text)
