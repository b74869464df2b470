"""Study "vllm": our decoding beside `transformers` and vLLM with the same weights.

vLLM runs in a process with its own Python (assets/benchmarks/vllm_answers.py).
"""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from medusa_chat import paths
from medusa_chat.bench.answers import AnswerFunction, Question, Run, fastest_of_rounds, questions
from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.drafters import ours, rows_of
from medusa_chat.bench.hf_baseline import (
    HFBaseline,
    compiled,
    no_compiler,
    read_baseline,
)
from medusa_chat.bench.rows import Row, unmeasured
from medusa_chat.bench.speed import DTYPES, LOOKUP
from medusa_chat.checkpoints import devices
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.checkpoints.vllm_export import export_vllm, write_plain_backbone
from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import LoadRequest
from medusa_chat.units import gb

COMPILED = ", static and compiled"
SCRIPT = ("benchmarks", "vllm_answers.py")  # of assets/; it is in a checkout only


@dataclass(frozen=True)
class Vllm:
    """One way to run vLLM. model: a folder. options: of its class. why: why it cannot run."""

    name: str
    model: Path
    options: dict[str, Any] = field(default_factory=dict)
    why: str = ""


class PeerFailed(Exception):
    """vLLM gave no answers; the message says why."""


def programs(context: BenchContext) -> Iterator[Row]:
    """Tokens a second of every program on the same questions at temperature 0, without the prompt;
    tokens a step where it drafts; and how much of plain decoding's texts it gives.

    What runs in this process goes in turns, half of the rounds before vLLM and half after it. A
    first answer of each is not counted.
    """
    asked, early = questions(context), (context.rounds + 1) // 2
    functions, missing = _own(context, asked)
    found = fastest_of_rounds(context, asked, functions, early)
    notes = dict.fromkeys(ours(context), context.loaded.info.precision)
    with TemporaryDirectory() as kept:
        for peer in _others(context, Path(kept)):
            context.progress(f"asking {peer.name}")
            try:
                found[peer.name], notes[peer.name] = ask(
                    context, peer, asked, devices.most_threads(), Path(kept)
                )
            except PeerFailed as error:
                missing[peer.name] = str(error)
    late = fastest_of_rounds(context, asked, functions, context.rounds - early)
    for name, runs in late.items():
        found[name] += runs
    yield from rows_of(asked, found, notes)
    for name, why in missing.items():
        yield unmeasured(name, "tokens/s", why)


def _own(
    context: BenchContext, asked: Sequence[Question]
) -> tuple[dict[str, AnswerFunction], dict[str, str]]:
    """The contestants in this process, each warmed up by an answer, and why others do not run."""
    functions = ours(context)
    room = max(len(question.ids) for question in asked) + context.max_new_tokens
    static = compiled(context.loaded.engine.backbone.device, room)
    lookup = {"prompt_lookup_num_tokens": LOOKUP}
    for dtype in DTYPES:
        baseline, name = read_baseline(context, dtype), f"transformers, {dtype}"
        for words, options in (("", {}), (", prompt lookup", lookup), (COMPILED, static)):
            functions[name + words] = partial(_stock, baseline, options)
    missing: dict[str, str] = {}
    for name, function in functions.items():
        context.progress(f"warming up: {name}")
        if why := _warm_up(context, name, function, asked[0]):
            missing[name] = why
    return {name: f for name, f in functions.items() if name not in missing}, missing


def _stock(baseline: HFBaseline, options: Mapping[str, Any], question: Question) -> Run:
    """transformers' answer with all threads, which every program here has."""
    with devices.torch_threads(devices.most_threads()):
        return baseline.answer(question, **options)[0]


def _warm_up(context: BenchContext, name: str, function: AnswerFunction, question: Question) -> str:
    """One answer; the reason where torch.compile cannot make the step of it."""
    if not name.endswith(COMPILED):
        function(question)
        return ""
    if why := no_compiler(context.loaded.info.device):
        return why
    try:
        function(question)
    except RuntimeError as error:
        return f"torch.compile failed: {str(error).strip().partition(chr(10))[0][:200]}"
    return ""


def _others(context: BenchContext, kept: Path) -> Iterator[Vllm]:
    """The ways to run vLLM. kept: a folder for files that it reads."""
    folder = _folder(context, kept)
    yield Vllm("vLLM, bf16, eager", folder)
    yield Vllm("vLLM, bf16, compiled", folder, {"enforce_eager": False})
    yield _with_heads(context, kept, folder)


def _folder(context: BenchContext, kept: Path) -> Path:
    """The backbone's folder; a GGUF file is unpacked into `kept` where vLLM is to run."""
    found = Checkpoint.find(context.request)
    if not found.weights.stored or context.vllm is None:
        return found.backbone
    size = gb(2 * sizes(found.weights.config).parameters)
    context.progress(f"unpacking {found.source.name} to bf16 for vLLM: {size} in {kept}")
    write_plain_backbone(kept / "backbone", with_settings(found))
    return kept / "backbone"


def _with_heads(context: BenchContext, kept: Path, folder: Path) -> Vllm:
    """vLLM with exported heads. folder: the backbone that it serves."""
    peer = Vllm("vLLM, bf16, eager, exported heads", folder)
    if context.vllm is None or context.vllm_heads is None:
        return replace(peer, why="needs --vllm PYTHON and --vllm-heads DIR, heads of --no-root")
    request = LoadRequest(str(context.vllm_heads), str(folder), offline=True)
    try:
        *_, (_, exported) = export_vllm(request, kept / "heads")
    except MedusaChatError as error:
        return replace(peer, why=str(error))
    assert exported is not None
    return replace(peer, options=exported.options)


def ask(
    context: BenchContext, peer: Vllm, asked: Sequence[Question], threads: int, kept: Path
) -> tuple[list[Run], str]:
    """Its answers to every question in every round, and its versions in words. kept: a folder for
    what is said. Raises PeerFailed."""
    script = paths.asset(*SCRIPT)
    why = peer.why or ("" if script.is_file() else "assets/benchmarks is in a checkout only")
    if why or context.vllm is None:
        raise PeerFailed(why or "needs --vllm PYTHON")
    wish = {
        "model": str(peer.model),
        "options": peer.options,
        "prompts": [question.ids for question in asked],
        "ends": sorted(context.loaded.engine.eos),
        "tokens": context.max_new_tokens,
        "rounds": context.rounds,
        "threads": threads,
    }
    wish_file, said_file = kept / "asked.json", kept / "said.json"
    wish_file.write_text(json.dumps(wish), "utf-8")
    command = [str(context.vllm), str(script), str(wish_file), str(said_file)]
    _run(command)
    said = json.loads(said_file.read_text("utf-8"))
    runs = [
        Run(question, tuple(a["tokens"]), a["steps"], float(a["stepped"]), a["seconds"])
        for answers in said["rounds"]
        for question, a in zip(asked, answers, strict=True)
    ]
    return runs, ", ".join(f"{name} {version}" for name, version in said["versions"].items())


def _run(command: Sequence[str]) -> None:
    """Raises PeerFailed with the last line that it printed."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
    except OSError as error:
        raise PeerFailed(f"{command[0]} does not start: {error.strerror}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else "it printed nothing"
        raise PeerFailed(f"{command[0]} ended with {done.returncode}: {last[:300]}")
