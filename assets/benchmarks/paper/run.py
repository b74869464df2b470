"""The paper's studies (Medusa, arXiv 2401.10774), on a checkpoint with heads.

    python assets/benchmarks/paper/run.py STUDY [--checkpoint ID|DIR] [--prompts FILE]

Trees, thresholds, temperatures and categories repeat figures and tables, "report" writes the row of
Table 1 (--report F.html, --answers F.jsonl for FastChat's judges), "heads" and "two-stage" train
(--data FILE). `--help` has the rest. What `medusa-chat bench` measures is not here.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from assisted import assisted
from bar_chart import chart_svg
from figures import categories, hardware, head_count, ladder, temperatures, thresholds, trees
from head_shapes import heads
from host_gaps import host_gaps
from kept_stages import two_stage
from paper_context import PaperContext
from reference import reference
from report import model_answers, report
from report_page import report_html
from roofline import roofline

from medusa_chat import paths
from medusa_chat.bench.answers import questions
from medusa_chat.bench.context import read_model
from medusa_chat.bench.rows import Row, table
from medusa_chat.bench.run import result_of
from medusa_chat.cli.options import named, prepare_process
from medusa_chat.cli.terminal import note
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.messages import LoadRequest

STUDIES: dict[str, Callable[[PaperContext], Iterator[Row]]] = {
    "ladder": ladder,
    "trees": trees,
    "thresholds": thresholds,
    "temperatures": temperatures,
    "categories": categories,
    "hardware": hardware,
    "assisted": assisted,
    "reference": reference,
    "head-count": head_count,
    "heads": heads,
    "two-stage": two_stage,
    "report": report,
    "roofline": roofline,
    "host": host_gaps,
}
WITHOUT_PROMPTS = ("hardware", "roofline", "heads", "two-stage", "host")
FILES = ("prompts", "draft", "data", "reference", "medusa_2")


OF_REPORT = ("report", "answers", "model_id")


def parser() -> argparse.ArgumentParser:
    """The options; each study reads some of them."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("study", choices=STUDIES, help="the study to run")
    add = made.add_argument
    add("--checkpoint", help="ID or DIR of a checkpoint with heads; default: the demo")
    add("--backbone", help="ID, DIR or FILE.gguf, for heads without their backbone")
    add("--precision", default="auto", help="number format of the backbone; default: auto")
    add("--device", default="auto", help="auto, cpu, cuda[:N] or mps; default: auto")
    add("--max-context", type=int, metavar="N", help="most tokens of a prompt with its answer")
    add("--prompts", type=Path, metavar="FILE", help="questions in MT-Bench's format")
    add("--questions", type=int, metavar="N", help="ask N of them, evenly spread; default: all")
    add("--tree", default="auto", help="tree of the drafts: auto, NAME or FILE; default: auto")
    add("--nodes", type=int, metavar="N", help="nodes of the tree, including the root")
    add("--rounds", type=int, default=5, metavar="N", help="repetitions, interleaved; default: 5")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="tokens per answer: 128")
    add("--acceptance", default="exact", help="report: exact, typical or typical-sampled")
    add("--temperature", type=float, default=0.0, metavar="X", help="report: default 0")
    add("--draft", type=Path, metavar="DIR", help="assisted: a draft model")
    add("--data", type=Path, metavar="FILE", help="heads, two-stage: conversations to train on")
    add("--reference", type=Path, metavar="DIR", help="reference: a checkout of the paper's code")
    add("--medusa-2", type=Path, metavar="DIR", help="ladder: a checkpoint of Medusa-2")
    add("--report", metavar="FILE", help="report: write a page with the answers")
    add("--answers", metavar="FILE", help="report: write answers for FastChat's judges")
    add("--model-id", metavar="NAME", help="report: the model's name in --answers")
    add("--picture", metavar="FILE", help="write the rows as an SVG")
    add("--output", metavar="FILE", help="write the rows as JSON")
    add("--json", action="store_true", help="print the rows as JSON")
    return made


def context_of(asked: argparse.Namespace) -> PaperContext:
    """The loaded checkpoint and what the studies read. Raises MedusaChatError."""
    settings = GenerationSettings(acceptance=asked.acceptance, temperature=asked.temperature)
    for name in OF_REPORT:
        if asked.study != "report" and getattr(asked, name) is not None:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is for the study report: run that, or omit --{option}")
    for name in FILES:
        path = getattr(asked, name)
        if path is not None and not path.exists():
            raise UsageError(f"there is no {path}: check the path")
    prepare_process(asked.device, precision=asked.precision)
    checkpoint, backbone = named(asked.checkpoint, asked.backbone)
    request = LoadRequest(
        checkpoint, backbone, asked.precision, asked.device, asked.max_context, offline=True
    )
    loaded = read_model(request, note)
    if not loaded.info.heads:
        raise UsageError(f"{loaded.info.name} has no Medusa heads: give a checkpoint that has")
    return PaperContext(
        request,
        loaded,
        asked.tree,
        asked.rounds,
        asked.max_new_tokens,
        note,
        questions=asked.questions,
        nodes=() if asked.nodes is None else (asked.nodes,),
        settings=settings,
        **{name: getattr(asked, name) for name in FILES},
    )


def rows_of(study: str, context: PaperContext) -> dict[str, Any]:
    """The rows of a study, each with the command that measures it, as `bench --json` prints."""
    command = f"python assets/benchmarks/paper/run.py {study}"
    rows = [{**row, "command": row["command"] or command} for row in STUDIES[study](context)]
    count = 0 if study in WITHOUT_PROMPTS else len(questions(context))
    return result_of(context, len(context.report.answered) or count, rows)


def write(file: str | None, text: Callable[[], str]) -> None:
    if file is not None:
        paths.write_text(Path(file), text())


def main(arguments: list[str] | None = None) -> None:
    asked = parser().parse_args(arguments)
    try:
        context = context_of(asked)
        result = rows_of(asked.study, context)
    except MedusaChatError as error:
        raise SystemExit(str(error)) from error
    print(json.dumps(result, indent=2) if asked.json else table(result))
    write(asked.output, lambda: json.dumps(result, indent=2) + "\n")
    write(asked.picture, lambda: chart_svg(result))
    write(asked.report, lambda: report_html(result, context.report))
    name = asked.model_id or f"{Path(context.loaded.info.name).name}-medusa"
    write(asked.answers, lambda: model_answers(context.report, name))


if __name__ == "__main__":
    main()
