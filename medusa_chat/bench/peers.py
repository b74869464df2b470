"""Study "peers": GGUF files by our decoding and by llama.cpp's own `llama-bench`, in turns.

Each file is loaded in a process of its own, as `generate` loads it, so that the peak of its memory
is that of the model alone. llama.cpp is whatever `llama-bench` the user has; none is built here.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

from medusa_chat import paths
from medusa_chat.bench.answers import Run, parting, per_step, rate, rotated, spread
from medusa_chat.bench.file_process import FileProcess
from medusa_chat.bench.llama_bench import LlamaBench, LlamaBenchFailed
from medusa_chat.bench.rows import Row, row, unmeasured
from medusa_chat.checkpoints.devices import most_threads, torch_threads
from medusa_chat.checkpoints.layouts.gguf_header import GgufHeader, read_gguf
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.machine import cpu_name
from medusa_chat.errors import UsageError
from medusa_chat.gguf_files import is_gguf, parts_of
from medusa_chat.messages import LoadRequest
from medusa_chat.training.conversations import read_conversations
from medusa_chat.units import gb

READ = 250_000_000  # float32 numbers, 1 GB, whose sum is the memory's bandwidth
LARGE, FEW = 3 * 10**9, 16  # bytes of a file from which an answer has so few tokens
LLAMA, PLAIN, DEFAULT = "llama.cpp", "plain", "default"
QUIET = 0.5  # of a core's work by others, from which the figures are called noisy
COMMAND = "medusa-chat bench --study peers"
PROMPTS_FILE = ("benchmarks", "peers.jsonl")  # of assets/; it is in a checkout only


@dataclass(frozen=True)
class Peers:
    """What to measure. request: how every file is loaded, without its name. files: GGUF files.
    asked: (text, category) of the prompts that the default answers. tokens: of an answer."""

    request: LoadRequest
    files: Sequence[Path]
    asked: Sequence[tuple[str, str]]
    rounds: int
    tokens: int
    llama: LlamaBench
    progress: Callable[[str], None]


@dataclass
class FileFigures:
    """The figures of one file, a value for each round. bandwidth: bytes a second."""

    llama: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)
    llama_peak: int = 0
    why: str = ""


def run_peers(
    request: LoadRequest,
    files: Sequence[Path],
    program: Path | None,
    *,
    rounds: int,
    max_new_tokens: int,
    progress: Callable[[str], None],
    prompts: Path | None = None,
    questions: int | None = None,
) -> dict[str, Any]:
    """Measure every file. program: llama-bench, None for that on the PATH. prompts: a file of
    questions, of which `questions` of each category are asked; None for the repository's. Raises
    UsageError for what is no GGUF file."""
    if not files:
        raise UsageError("--study peers compares GGUF files: name each with --file FILE.gguf")
    for file in files:
        if not is_gguf(file.name) or not file.is_file():
            raise UsageError(f"{file} is no GGUF file: name each with --file FILE.gguf")
    asked = asked_by_category(prompts, questions, progress)
    llama = LlamaBench(program)
    return measure(Peers(request, files, asked, rounds, max_new_tokens, llama, progress))


def asked_by_category(
    prompts: Path | None, count: int | None, progress: Callable[[str], None]
) -> list[tuple[str, str]]:
    """(text, category) of the first questions of a file's rows, of each category `count`, evenly
    spread. Raises UsageError."""
    file = prompts or paths.asset(*PROMPTS_FILE)
    if not file.is_file():
        raise UsageError("assets/benchmarks is in a checkout only: name questions with --prompts")
    read = read_conversations(file, prompts=True)
    for note in read.notes:
        progress(note)
    by_category: dict[str, list[str]] = {}
    for one in read.conversations:
        by_category.setdefault(one.category, []).append(one.asked[0])
    return [(t, name) for name, texts in by_category.items() for t in spread(texts, count)]


def measure(wanted: Peers) -> dict[str, Any]:
    """The rows of every file, as other studies give them."""
    told = machine()
    if "noisy" in told["load"]:
        wanted.progress(told["load"])
    rows = [one for file in wanted.files for one in _rows_of(wanted, file)]
    return {"machine": told | {"llama.cpp": wanted.llama.version}, "rows": rows, "verdict": ""}


def machine() -> dict[str, Any]:
    """The processor, the threads that both programs get, and how busy others keep it."""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    noisy = "; other programs run: the figures are noisy" if load > QUIET else ""
    return {
        "device": f"cpu ({cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {cores} cores)",
        "threads": most_threads(),
        "clock": "the processor's, of one thread" if most_threads() == 1 else "the wall's",
        "load": f"{load:.1f} before the start, of {cores} cores{noisy}",
        "torch": torch.__version__,
    }


def _rows_of(wanted: Peers, file: Path) -> Iterator[Row]:
    """The rows of a file: what is measured in turns, then whole answers to prompts."""
    header = read_gguf(LocalFolder(file.parent), file.name)
    size = sum((file.parent / part).stat().st_size for part in parts_of(file.name))
    tokens = min(wanted.tokens, FEW) if size > LARGE else wanted.tokens
    wanted.progress(f"{file.name}: loading")
    request = LoadRequest(**{**vars(wanted.request), "checkpoint": str(file), "backbone": None})
    with FileProcess(request, tokens) as ours:
        figures = _in_turns(wanted, file, tokens, ours)
        answers = list(_answers(wanted, file, ours))
        peak = ours.peak()
    kind, first = ours.kind, ours.first_answer
    yield from _speed_rows(file, figures, read_bytes(header), f"{tokens} tokens; {kind}")
    yield from _answer_rows(file, figures, answers, tokens)
    yield from _memory_rows(file, figures, size, peak)
    note = "from the start of the process, its imports included, to the first token"
    yield _named(row(f"{file.name}: first answer", [first], "s", note=note))


def _in_turns(wanted: Peers, file: Path, tokens: int, ours: FileProcess) -> FileFigures:
    """Memory bandwidth, llama.cpp and plain decoding in each round, in an order that changes."""
    found = FileFigures()

    def llama() -> None:
        if found.why:
            return
        try:
            speed, peak = wanted.llama.run(file, tokens, most_threads(), ours.device)
        except LlamaBenchFailed as error:
            found.why = str(error)
            return
        found.llama.append(speed)
        found.llama_peak = max(found.llama_peak, peak)

    turns: list[Callable[[], None]] = [
        lambda: found.bandwidth.append(bandwidth()),
        llama,
        lambda: found.plain.append(ours.plain(tokens).rate),
    ]
    ours.plain(tokens)  # not counted
    for number in range(wanted.rounds):
        wanted.progress(f"{file.name}: round {number + 1} of {wanted.rounds}")
        for turn in rotated(turns, number):
            turn()
    return found


def _answers(wanted: Peers, file: Path, ours: FileProcess) -> Iterator[tuple[str, Run, Run]]:
    """(category, plain, default) of every prompt, the two in turns."""
    for number, (text, category) in enumerate(wanted.asked):
        wanted.progress(f"{file.name}: prompt {number + 1} of {len(wanted.asked)}")
        by_name = {}
        for drafter in rotated(("none", "auto"), number):
            by_name[drafter] = ours.answer(text, drafter)
        yield category, by_name["none"], by_name["auto"]


def bandwidth() -> float:
    """Bytes a second that as many threads as decode read: the median of five sums over 1 GB.
    Of one thread by the processor's clock, as its speed (FileProcess)."""
    clock = process_time if most_threads() == 1 else perf_counter
    with torch_threads(most_threads()):
        values = torch.ones(READ)
        seconds = []
        for _ in range(5):
            started = clock()
            values.sum()
            seconds.append(clock() - started)
    return 4 * READ / median(seconds)


def read_bytes(header: GgufHeader) -> int:
    """Bytes of the file that a plain step reads: every tensor, of experts as many as a token uses,
    without an embedding that is not the LM head."""
    tensors = dict(header.tensors)
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight", None)
    family = header.metadata.get("general.architecture", "")
    used = header.metadata.get(f"{family}.expert_used_count", 1)
    experts = header.metadata.get(f"{family}.expert_count", 1) or 1
    share = used / experts if used else 1
    return int(sum(t.bytes * (share if "_exps" in n else 1) for n, t in tensors.items()))


def _speed_rows(file: Path, figures: FileFigures, read: int, note: str) -> Iterator[Row]:
    """llama.cpp's speed, ours, and how near ours is to what the memory gives."""
    name, llama = file.name, f"{file.name}: {LLAMA}"
    if figures.llama:
        yield _named(row(llama, figures.llama, "tokens/s", note=note.partition(";")[0]))
        both = {"against": llama, "baseline": figures.llama}
    else:
        yield unmeasured(llama, "tokens/s", figures.why)
        both = {}
    yield _named(row(f"{name}: {PLAIN}", figures.plain, "tokens/s", note=note, **both))
    speeds = [1e-9 * value for value in figures.bandwidth]
    yield _named(row(f"{name}: memory bandwidth", speeds, "GB/s", note="a sum over 1 GB"))
    shares = [r * read / b for r, b in zip(figures.plain, figures.bandwidth, strict=True)]
    note = f"a plain step reads {gb(read)} of the file"
    yield _named(row(f"{name}: share of the bandwidth", shares, "of 1", note=note))


def _answer_rows(
    file: Path, figures: FileFigures, answers: Sequence[tuple[str, Run, Run]], tokens: int
) -> Iterator[Row]:
    """Of each category of prompts: the default against plain decoding of the same prompts."""
    for category in dict.fromkeys(found[0] for found in answers):
        pairs = [(p, d) for of, p, d in answers if of == category and p.steps and d.steps]
        where, label = f" on {category}" if category else "", f"{file.name}: "
        if not pairs:
            yield unmeasured(f"{label}{DEFAULT}{where}", "tokens/s", "no answer has a step")
            continue
        plain, drafted = ([pair[at] for pair in pairs] for at in (0, 1))
        note = f"{len(pairs)} prompts, at most {tokens} tokens, without the prompt"
        if figures.llama:
            note += f"; {rate(drafted) / median(figures.llama):.2f} x llama.cpp"
        yield _rates(f"{label}{PLAIN}{where}", plain, None, note)
        yield _rates(f"{label}{DEFAULT}{where}", drafted, plain, note)
        yield _named(per_step(f"{label}tokens a step{where}", drafted))
        same = [
            float(parting(p.tokens, d.tokens) is None) for p, d in zip(plain, drafted, strict=True)
        ]
        total = sum(same) / len(same)
        yield _named(row(f"{label}same text{where}", same, "of answers", value=total))


def _rates(name: str, runs: Sequence[Run], plain: Sequence[Run] | None, note: str) -> Row:
    """Tokens per second over all answers; minimum and maximum are of single answers."""
    found = row(name, [run.rate for run in runs], "tokens/s", note=note, value=rate(runs))
    if plain is not None:
        found |= {"against": name.replace(DEFAULT, PLAIN), "ratio": rate(runs) / rate(plain)}
    return _named(found)


def _memory_rows(file: Path, figures: FileFigures, size: int, peak: int) -> Iterator[Row]:
    """The peaks of both processes, in GB, against the bytes of the file."""
    label, of_file = f"{file.name}: peak memory", [1e-9 * size]
    note = "the process's, the part of the file that it maps included"
    for name, value in ((label, peak), (f"{label}, {LLAMA}", figures.llama_peak)):
        if not value:
            yield unmeasured(name, "GB", figures.why or "only on Linux")
            continue
        yield _named(row(name, [1e-9 * value], "GB", f"the file, {gb(size)}", of_file, note))


def _named(found: Row) -> Row:
    return {**found, "command": COMMAND}
