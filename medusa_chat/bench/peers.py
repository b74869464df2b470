"""Studies "drafters" and "peers": our decoding, and other programs with the same weights.

Each of these runs in a process with its own Python (assets/benchmarks/peer.py).
"""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from medusa_chat import paths
from medusa_chat.bench.answers import (
    NO_STEP,
    AnswerFunction,
    Question,
    Run,
    fastest,
    fastest_of_rounds,
    page_run,
    parting,
    per_step,
    questions,
    rate,
)
from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.hf_baseline import (
    HFBaseline,
    backbone_folder,
    compiled,
    no_compiler,
    read_baseline,
)
from medusa_chat.bench.rows import Row, row, unmeasured
from medusa_chat.bench.speed import DTYPES, LOOKUP
from medusa_chat.checkpoints import devices
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.vllm_export import export_vllm
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.gguf_files import is_gguf, parts_of
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.tuner import tune

PLAIN = "ours, plain"
OURS = {
    PLAIN: "none",
    "ours, prompt lookup": "prompt-lookup",
    "ours, medusa": "medusa",
    "ours, auto": "auto",
}
COMPILED = ", static and compiled"
COUNTED = "decoding without the prompt; of an answer the fastest round"
SCRIPT = ("benchmarks", "peer.py")  # of assets/; it is in a checkout only


@dataclass(frozen=True)
class Peer:
    """A program and the model it serves. python: of its environment, None where no option named it.
    model: a GGUF file or a folder. options: of vLLM's class. why: the reason it cannot run."""

    name: str
    program: str
    python: Path | None
    model: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    why: str = ""


class PeerFailed(Exception):
    """A peer gave no answers; the message says why."""


def drafters(context: BenchContext) -> Iterator[Row]:
    """As "peers", for our own decoding alone: the drafters take turns on the same questions."""
    for _ in tune(context.loaded, context.budget):
        pass
    asked = questions(context)
    found = fastest_of_rounds(context, asked, _ours(context), context.rounds)
    yield from _rows(asked, found, dict.fromkeys(OURS, context.loaded.info.precision))


def peers(context: BenchContext) -> Iterator[Row]:
    """Tokens a second of every program on the same questions at temperature 0, without the prompt;
    tokens a step where it drafts; and how much of plain decoding's texts it gives.

    What runs in this process goes in turns, half of the rounds before the other programs and half
    after them; these run one after another. A first answer of each is not counted.
    """
    for _ in tune(context.loaded, context.budget):
        pass
    asked, early = questions(context), (context.rounds + 1) // 2
    functions, missing = _own(context, asked)
    found = fastest_of_rounds(context, asked, functions, early)
    notes = dict.fromkeys(OURS, context.loaded.info.precision)
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
    yield from _rows(asked, found, notes)
    for name, why in missing.items():
        yield unmeasured(name, "tokens/s", why)


def _own(
    context: BenchContext, asked: Sequence[Question]
) -> tuple[dict[str, AnswerFunction], dict[str, str]]:
    """The contestants in this process, each warmed up by an answer, and why others do not run."""
    functions = _ours(context)
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


def _ours(context: BenchContext) -> dict[str, AnswerFunction]:
    return {
        name: partial(page_run, context, settings=GenerationSettings(drafter=drafter, seed=0))
        for name, drafter in OURS.items()
    }


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


def _others(context: BenchContext, kept: Path) -> Iterator[Peer]:
    """The programs with their own Python. kept: a folder for files that they read."""
    file, of_llama = Checkpoint.find(context.request).source, ("llama.cpp", context.llama_cpp)
    if context.llama_cpp is None or not is_gguf(file.name):
        why = "needs --llama-cpp PYTHON and a GGUF file as the backbone"
        yield Peer("llama.cpp", *of_llama, why=why)
    else:
        yield Peer(f"llama.cpp, {file.name}", *of_llama, file)
        whole = write_as_bf16(file, kept / "bf16.gguf")
        yield Peer("llama.cpp, its weights in bf16", *of_llama, whole)
    folder, of_vllm = backbone_folder(context), ("vllm", context.vllm)
    yield Peer("vLLM, bf16, eager", *of_vllm, folder)
    yield Peer("vLLM, bf16, compiled", *of_vllm, folder, {"enforce_eager": False})
    yield _with_heads(context, kept, folder)


def _with_heads(context: BenchContext, kept: Path, folder: Path) -> Peer:
    """vLLM with exported heads. folder: the backbone that it serves."""
    peer = Peer("vLLM, bf16, eager, exported heads", "vllm", context.vllm, folder)
    if context.vllm is None or context.vllm_heads is None:
        return replace(peer, why="needs --vllm PYTHON and --vllm-heads DIR, heads of --no-root")
    request = LoadRequest(str(context.vllm_heads), str(folder), offline=True)
    try:
        *_, (_, exported) = export_vllm(request, kept / "heads")
    except MedusaChatError as error:
        return replace(peer, why=str(error))
    assert exported is not None
    return replace(peer, options=exported.options)


def _rows(
    asked: Sequence[Question], found: Mapping[str, Sequence[Run]], notes: Mapping[str, str]
) -> Iterator[Row]:
    """The rows over the questions to which every program has a timed answer."""
    chosen = {name: fastest(runs) for name, runs in found.items()}
    timed = [q for q in map(id, asked) if all(q in runs for runs in chosen.values())]
    if not timed:
        raise UsageError(NO_STEP)
    best = {name: [runs[q] for q in timed] for name, runs in chosen.items()}
    for name, runs in best.items():
        yield _speed(name, runs, best[PLAIN], "; ".join((notes.get(name, ""), COUNTED)).strip("; "))
    for name, runs in best.items():
        if any(run.steps < run.stepped for run in runs):
            yield per_step(f"{name}: tokens a step", runs)
    for name, runs in best.items():
        yield _same_text(name, runs, best[PLAIN])


def _speed(name: str, runs: Sequence[Run], plain: Sequence[Run], note: str) -> Row:
    """Tokens per second over all answers; minimum and maximum are of single answers."""
    value = rate(runs)
    found = row(name, [run.rate for run in runs], "tokens/s", PLAIN, note=note, value=value)
    return {**found, "ratio": value / rate(plain)}


def _same_text(name: str, runs: Sequence[Run], plain: Sequence[Run]) -> Row:
    """The share of plain decoding's tokens that the answers have, up to the first that differs."""
    wanted = [len(base.tokens) for base in plain]
    places = [parting(run.tokens, base.tokens) for run, base in zip(runs, plain, strict=True)]
    alike = [n if at is None else at for at, n in zip(places, wanted, strict=True)]
    shares = [count / max(n, 1) for count, n in zip(alike, wanted, strict=True)]
    note = f"up to the first that differs; {places.count(None)} of {len(places)} whole answers"
    total = sum(alike) / max(sum(wanted), 1)
    return row(f"{name}: same tokens", shares, f"of {PLAIN}'s", note=note, value=total)


def ask(
    context: BenchContext, peer: Peer, asked: Sequence[Question], threads: int, kept: Path
) -> tuple[list[Run], str]:
    """Its answers to every question in every round, and its versions in words. kept: a folder for
    what is said. Raises PeerFailed."""
    script = paths.asset(*SCRIPT)
    why = peer.why or ("" if script.is_file() else "assets/benchmarks is in a checkout only")
    if why or peer.python is None:
        raise PeerFailed(why or f"needs --{peer.program.replace('.', '-')} PYTHON")
    wish = {
        "program": peer.program,
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
    command = [str(peer.python), str(script), str(wish_file), str(said_file)]
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


def write_as_bf16(file: Path, output: Path) -> Path:
    """A GGUF file, of all its parts, with the same weights in bf16 (vectors in fp32), and the same
    metadata."""
    import gguf  # all else works without it

    readers = [gguf.GGUFReader(file.with_name(name)) for name in parts_of(file.name)]
    reader = readers[0]
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(output, architecture)
    left_out = (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE)
    for name, entry in reader.fields.items():
        if name in left_out or name.startswith(("GGUF.", "split.")):
            continue
        kind, inner = entry.types[0], entry.types[-1]
        sub_type = inner if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), kind, sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in chain.from_iterable(one.tensors for one in readers):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        wanted = gguf.GGMLQuantizationType.BF16 if values.ndim > 1 else None
        data = values if wanted is None else gguf.quantize(values, wanted)
        writer.add_tensor(tensor.name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output
