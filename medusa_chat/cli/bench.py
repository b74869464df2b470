"""`medusa-chat bench`: checks its options before a model is loaded, measures, prints the rows."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from medusa_chat import paths
from medusa_chat.cli.options import (
    AsJson,
    DraftOptions,
    TreeName,
    count,
    file_path,
    folder_path,
    refuse_unknown_tree,
    value,
    values_of,
)
from medusa_chat.cli.terminal import json_line, progress, require_writable, write_errors
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest

MEASURED = "steps, speed, turns, load, context"
WITH_PROMPTS = ("drafters", "peers", "vllm", "exactness")
# studies that are now scripts in the repository
MOVED = frozenset(
    "ladder trees thresholds temperatures categories hardware assisted reference head-count heads "
    "two-stage report roofline host".split()
)


@dataclass(frozen=True)
class BenchOptions:
    """The studies, and the output."""

    tree: TreeName = "auto"
    rounds: Annotated[int, count("Repetitions, interleaved.", min=1)] = 5
    max_new_tokens: Annotated[int, count("Tokens per answer.", min=2)] = 128
    study: Annotated[
        list[str] | None,
        value(
            "NAME",
            f"Run only this study; repeatable: {MEASURED}. Run only by name: "
            f"{', '.join(WITH_PROMPTS)}.",
        ),
    ] = None
    shape: Annotated[
        str | None, value("7b|8b", "Use random weights of this size instead of a checkpoint.")
    ] = None
    layers: Annotated[int | None, count("With --shape: use only N layers.", min=1)] = None
    as_json: AsJson = False
    output: Annotated[Path | None, file_path("Also write the JSON here.")] = None


@dataclass(frozen=True)
class StudyInputs:
    """The inputs of studies."""

    prompts: Annotated[Path | None, file_path("Questions in the format of MT-Bench.")] = None
    questions: Annotated[int | None, count("Use N of the prompts, evenly spaced.", min=1)] = None
    nodes: Annotated[
        list[int] | None,
        count(
            "With --study exactness or drafters: nodes of each step; repeatable for drafters.",
            min=2,
        ),
    ] = None
    vllm: Annotated[Path | None, value("PYTHON", "With --study vllm: a Python that has vLLM.")] = (
        None
    )
    vllm_heads: Annotated[
        Path | None, folder_path("With --study vllm: heads trained with --no-root.")
    ] = None


@dataclass(frozen=True)
class PeerInputs:
    """The inputs of the study "peers"."""

    file: Annotated[
        list[Path] | None,
        file_path("With --study peers: a GGUF file; repeatable. Default: that of --checkpoint."),
    ] = None
    llama_bench: Annotated[
        Path | None,
        file_path("With --study peers: llama.cpp's llama-bench. Default: that on the PATH."),
    ] = None


@dataclass(frozen=True)
class Bench(StudyInputs, PeerInputs, DraftOptions, BenchOptions):
    """Measure plain decoding and drafting on this machine, beside other programs."""

    def run(self) -> None:
        """Check the options, measure, print and write the rows. Raises UsageError."""
        request = self.load_request()
        refuse_unknown_tree(self.tree)
        _refuse_misplaced(self)
        if self.output is not None:
            require_writable(self.output, self.prompts)
        _refuse_missing("file", Path.is_file, self.prompts)
        _refuse_missing("file", Path.is_file, *(self.file or ()))
        _refuse_missing("program", shutil.which, self.llama_bench, self.vllm)
        _refuse_missing("folder", Path.is_dir, self.vllm_heads)
        from medusa_chat.bench import table

        result = _measure(request, self)
        print(json_line(result, indent=2) if self.as_json else table(result))
        if self.output is not None:
            with write_errors(self.output):
                paths.write_text(self.output, json.dumps(result, indent=2) + "\n")


def _measure(request: LoadRequest, options: Bench) -> dict[str, Any]:
    """The rows of a checkpoint, of random weights, or of GGUF files beside llama.cpp."""
    if options.study == ["peers"]:
        from medusa_chat.bench import run_peers

        named = [Path(options.checkpoint)] if options.checkpoint else []
        return run_peers(
            request,
            options.file or named,
            options.llama_bench,
            rounds=options.rounds,
            max_new_tokens=options.max_new_tokens,
            progress=progress,
            prompts=options.prompts,
            questions=options.questions,
        )
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
        **values_of(StudyInputs, options) | {"nodes": tuple(options.nodes or ())},
    )


def _refuse_missing(kind: str, is_there: Callable[[Path], object], *given: Path | None) -> None:
    """Raises UsageError for a missing path, before hours of measuring."""
    for path in filter(None, given):
        if not is_there(path):
            raise UsageError(f"there is no {kind} {path}: check the path")


def _refuse_misplaced(options: Bench) -> None:
    """Raises UsageError for studies that moved, and for options that the given studies ignore."""
    studies = options.study or ()
    for name in studies:
        if name in MOVED:
            raise UsageError(
                f"the study {name} is a script now: run "
                f"`python assets/benchmarks/paper/run.py {name}` in a checkout"
            )
    if not set(studies) & set(WITH_PROMPTS) and (options.prompts or options.questions) is not None:
        raise UsageError(
            f"--prompts and --questions are for the studies {', '.join(WITH_PROMPTS)}: add --study "
            "NAME, or omit them"
        )
    if len(options.nodes or ()) > 1 and list(studies) != ["drafters"]:
        raise UsageError("--nodes is repeatable for --study drafters alone: give one number")
    if "peers" in studies and (len(studies) > 1 or options.shape):
        raise UsageError("--study peers loads each file anew: run it alone, without --shape")
    if "peers" not in studies and (options.file or options.llama_bench):
        raise UsageError("--file and --llama-bench are for --study peers: add it, or omit them")
    if options.shape is not None and (options.checkpoint or options.backbone):
        raise UsageError("--shape uses random weights: omit --checkpoint and --backbone")
    if options.shape not in (None, "7b", "8b"):
        raise UsageError(f"shape is {options.shape!r}: choose 7b or 8b")
    if options.shape is None and options.layers is not None:
        raise UsageError("--layers needs --shape: add --shape 7b or 8b, or omit it")
