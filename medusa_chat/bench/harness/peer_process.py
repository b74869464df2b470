"""Peer: another program on the same weights, started in a process with a Python of its own."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.report_data import Question, Run
from medusa_chat.gguf_files import parts_of

SCRIPT = ("benchmarks", "peer.py")  # of assets/; it is in a checkout only


@dataclass(frozen=True)
class Peer:
    """A program and what it serves. python: of its environment, None where it was not named. model:
    a GGUF file or a folder. options: of vLLM's class. why: the reason why it cannot be asked."""

    name: str
    program: str
    python: Path | None
    model: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    why: str = ""


class PeerFailed(Exception):
    """A peer that gave no answers; the message is the reason."""


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
