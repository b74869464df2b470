"""`medusa-chat bench`: its options are checked before a model is loaded; then it measures."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from medusa_chat import paths
from medusa_chat.cli.options import (
    AsJson,
    LoadOptions,
    TreeName,
    count,
    file_path,
    folder_path,
    refuse_unknown_tree,
    value,
    values_of,
)
from medusa_chat.cli.terminal import json_line, progress, refusing, require_folder
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest

if TYPE_CHECKING:
    from medusa_chat.bench import Report

MEASURED = "steps, speed, turns, load, context, host"
ASKING = (  # --prompts
    *("ladder", "trees", "thresholds", "temperatures", "categories", "assisted", "reference"),
    *("head-count", "report", "drafters", "peers", "exactness", "tuner"),
)
FINDINGS = (
    "Run only when named (the paper's findings, other programs): ladder, trees, thresholds, "
    "temperatures, categories, hardware, assisted, reference, head-count, heads, two-stage, "
    "report, roofline, drafters, peers, exactness, tuner"
)


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and where the rows go; then the options of `--study report`."""

    tree: TreeName = "auto"
    rounds: Annotated[int, count("Repetitions, interleaved.", min=1)] = 5
    max_new_tokens: Annotated[int, count("Tokens per answer.", min=2)] = 128
    study: Annotated[
        list[str] | None, value("NAME", f"Run this study only; repeatable: {MEASURED}. {FINDINGS}.")
    ] = None
    shape: Annotated[
        str | None, value("7b|8b", "Use random weights of this size, no checkpoint.")
    ] = None
    layers: Annotated[int | None, count("With --shape: use only N layers.", min=1)] = None
    as_json: AsJson = False
    output: Annotated[Path | None, file_path("Also write the JSON here.")] = None
    picture: Annotated[Path | None, value("FILE.svg", "Also draw the results as a chart.")] = None
    report: Annotated[
        Path | None, value("FILE.html", "With --study report: write the page here.")
    ] = None
    answers: Annotated[
        Path | None, value("FILE.jsonl", "With --study report: answers for FastChat's judges.")
    ] = None
    model_id: Annotated[
        str | None, value("NAME", "With --answers: the model's name in the file.")
    ] = None
    acceptance: Annotated[str, value("NAME", "With --study report: acceptance rule.")] = "exact"
    temperature: Annotated[float, value("T", "With --study report: 0 to 2.")] = 0.0


@dataclass(frozen=True)
class StudyInputs:
    """What studies read, and how much of it."""

    prompts: Annotated[Path | None, file_path("Questions in MT-Bench's format.")] = None
    questions: Annotated[
        int | None, count("With --prompts: ask N of them, evenly spread.", min=1)
    ] = None
    nodes: Annotated[
        int | None, count("Nodes of the tree in studies of the paper, not the tuner's.", min=2)
    ] = None
    draft: Annotated[Path | None, folder_path("Draft model with the same vocabulary.")] = None
    data: Annotated[Path | None, file_path("Conversations for studies that train.")] = None
    reference: Annotated[
        Path | None, folder_path("Checkout of FasterDecoding/Medusa to compare with.")
    ] = None
    medusa_2: Annotated[Path | None, folder_path("With --study ladder: of medusa-2.")] = None
    llama_cpp: Annotated[
        Path | None, value("PYTHON", "With --study peers: one with llama-cpp-python.")
    ] = None
    vllm: Annotated[Path | None, value("PYTHON", "With --study peers: one with vLLM.")] = None
    vllm_heads: Annotated[Path | None, folder_path("With --study peers: --no-root heads.")] = None


@dataclass(frozen=True)
class Bench(StudyInputs, LoadOptions, BenchOptions):
    """Measure Medusa against plain decoding and transformers' generate on this machine."""

    def run(self) -> None:
        """Check the options, measure, print the rows and write the files. Raises UsageError."""
        request = self.load_request()
        refuse_unknown_tree(self.tree)
        _refuse_misplaced(self)
        read = (self.prompts, self.data)
        for file in (self.output, self.picture, self.report, self.answers):
            if file is not None:
                require_folder(file, *read)
        _refuse_missing("file", Path.is_file, *read)
        _refuse_missing("program", shutil.which, self.llama_cpp, self.vllm)
        folders = (self.draft, self.reference, self.medusa_2, self.vllm_heads)
        _refuse_missing("folder", Path.is_dir, *folders)
        settings = GenerationSettings(acceptance=self.acceptance, temperature=self.temperature)
        from medusa_chat.bench import Report, table

        report = Report() if "report" in (self.study or ()) else None
        result = _measure(request, self, settings, report)
        print(json_line(result, indent=2) if self.as_json else table(result))
        _write_rows(result, self.output, self.picture)
        if report is not None:
            _write_report(result, report, self)


def _measure(
    request: LoadRequest, options: Bench, settings: GenerationSettings, report: "Report | None"
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
            studies=options.study or (),
        )
    return run(
        request,
        rounds=options.rounds,
        max_new_tokens=options.max_new_tokens,
        tree=options.tree,
        progress=progress,
        studies=options.study or (),
        settings=settings,
        report=report,
        **values_of(StudyInputs, options),
    )


def _refuse_missing(kind: str, is_there: Callable[[Path], object], *given: Path | None) -> None:
    """Refuse what is not there before hours of measuring."""
    for path in filter(None, given):
        if not is_there(path):
            raise UsageError(f"there is no {kind} {path}: check the path")


def _refuse_misplaced(options: Bench) -> None:
    """Refuse options that the studies asked for would not read, and a picture of another kind."""
    if options.picture is not None and options.picture.suffix.lower() != ".svg":
        raise UsageError(f"--picture is drawn as SVG: give {options.picture.stem}.svg")
    asks = set(options.study or ()) & {*ASKING}
    if not asks and (options.prompts is not None or options.questions is not None):
        raise UsageError(
            f"--prompts and --questions are for the studies {', '.join(ASKING)}: add --study NAME, "
            "or omit them"
        )
    if options.shape is not None and (options.checkpoint or options.backbone):
        raise UsageError("--shape has random weights: omit --checkpoint and --backbone")
    if options.shape not in (None, "7b", "8b"):
        raise UsageError(f"shape is {options.shape!r}: choose 7b or 8b")
    if options.shape is None and options.layers is not None:
        raise UsageError("--layers needs --shape: add --shape 7b or 8b, or omit it")
    if "report" in (options.study or ()):
        return
    if any(one is not None for one in (options.report, options.answers, options.model_id)):
        raise UsageError(
            "--report, --answers and --model-id are for --study report: add it, or omit them"
        )
    if (options.acceptance, options.temperature) != ("exact", 0.0):
        raise UsageError(
            "--acceptance and --temperature are for --study report: add it, or omit them"
        )


def _write_rows(result: dict[str, Any], output: Path | None, picture: Path | None) -> None:
    """Write what --output and --picture name."""
    _write(output, json.dumps(result, indent=2) + "\n")
    if picture is not None:
        from medusa_chat.bench import chart_svg

        _write(picture, chart_svg(result))


def _write_report(result: dict[str, Any], report: "Report", options: Bench) -> None:
    """Write what --report and --answers name."""
    from medusa_chat.bench import model_answers, report_html

    if options.report is not None:
        _write(options.report, report_html(result, report))
    if options.answers is not None:
        name = Path(result["machine"]["model"].partition(", ")[0]).name
        _write(options.answers, model_answers(report, options.model_id or f"{name}-medusa"))


def _write(file: Path | None, text: str) -> None:
    if file:
        with refusing(file):
            paths.write_text(file, text)
