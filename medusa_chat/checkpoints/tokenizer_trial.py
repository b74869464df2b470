"""TokenizerTrial: a tokenizer.json read and used in a process of its own, before it is used here.

An expression in it may take for ever, and a part that is broken may end the process or raise what
is no Exception, at the first text that meets it. A second of a limited process tells.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_chat.checkpoints.process_limits import environment, limit_memory
from medusa_chat.errors import ModelError, first_line, is_panic
from medusa_chat.units import gb

FILE = "tokenizer.json"
# kinds of parts that hold neither expressions nor tables: no trial is needed
PLAIN = {b"BPE", b"ByteLevel", b"TemplateProcessing", b"Sequence", b"Metaspace", b"Fuse", b"NFC"}
KIND = re.compile(rb'"type"\s*:\s*"(\w+)"')
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
GROUPS = ("normalizers", "pretokenizers", "processors", "decoders")  # parts of a Sequence
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
SECONDS = 2  # of the processor for one text; usual tokenizers take 5 ms for the longest
READING = 60  # of the processor to read the file; Gemma's 35 MB take a second
READ = "when it is read"
PATIENCE = 300  # of the clock for all, on a busy machine
MEMORY, GROWTH = 1 << 30, 64  # bytes, and as many times the file's own
UNITS = ("a", "A", " ", "\n", "0", ".", "'", "_", "\u00e9", "\u4e2d", "\u0301", "\U0001f642")
UNITS += ("ab ", " a", "a0", "A.\n", "<|", "\u2581")
LENGTHS = (1, 24, 128, 2048)  # an expression that takes 2^n steps shows with few, n^3 with many
ENDINGS = ("", "!")


class TokenizerTrial:
    """The trial of a folder's tokenizer.json, begun at once. Closing it ends the process."""

    def __init__(self, folder: Path, plain_too: bool = False) -> None:
        """No process is needed where the file is not there, and for one of plain parts where it is
        read here afterwards. Raises ModelError where none can be started."""
        self._folder = folder
        self._child: subprocess.Popen[str] | None = None
        file = folder / FILE
        if not file.is_file() or not (plain_too or _is_suspect(file)):
            return
        command = [sys.executable, "-P", "-m", __name__, str(file)]
        nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE  # stderr: libraries in Rust tell there
        try:
            self._child = subprocess.Popen(
                command, stdin=nowhere, stdout=pipe, stderr=nowhere, env=environment(), text=True
            )
        except OSError as error:
            raise ModelError(f"the tokenizer in {folder} cannot be tried: {error}") from error

    def refuse(self) -> None:
        """Wait for its end. Raises ModelError, in one line, where the tokenizer failed."""
        if self._child is None:
            return
        try:
            said, _ = self._child.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            said = ""
        lines = [json.loads(line) for line in said.splitlines() if line.endswith("}")]
        last = lines[-1] if lines else {"trying": READ}
        if "trying" in last:  # it ended there
            problem = f"takes too long or ends the process {last['trying']}"
        else:
            problem = last["problem"]
        self.close()
        if problem:
            raise ModelError(
                f"the tokenizer in {self._folder} {problem}: it is broken or malicious, use "
                "another checkpoint"
            )

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            if self._child.stdout is not None:
                self._child.stdout.close()
            self._child = None


def _is_suspect(file: Path) -> bool:
    """Whether a part is of no plain kind, or of none: such a part is read by its other keys."""
    data = file.read_bytes()
    if not PLAIN.issuperset(KIND.findall(data)):  # told without reading 35 MB
        return True
    try:
        values = json.loads(data)
        parts = {name: values[name] for name in PARTS if values.get(name) is not None}
        has_affix = any(parts["model"].get(name) for name in AFFIXES)
        return has_affix or not PLAIN.issuperset(_kinds(list(parts.values())))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return True  # what kind of file it is, the trial finds


def _kinds(parts: list[Any]) -> Iterator[bytes]:
    for part in parts:
        yield str(part.get("type")).encode()
        for group in GROUPS:
            yield from _kinds(part.get(group, []))


def main(file: str) -> None:
    """Try the tokenizer, a line for each text before it is read, and one that tells the problem."""
    limit_memory(MEMORY + GROWTH * Path(file).stat().st_size)
    print(json.dumps({"problem": _problem(Path(file))}), flush=True)


def _problem(file: Path) -> str:
    """Why the tokenizer cannot be used; "" where it can."""
    from tokenizers import Tokenizer  # not where the trial is only asked for: by the page, too

    at = READ
    try:
        _begin(at, READING)
        tokenizer = Tokenizer.from_file(str(file))
        for length in LENGTHS:
            for unit in UNITS:
                for ending in ENDINGS:
                    at = f"at {length} times {unit!r}" + (f" and {ending!r}" if ending else "")
                    _begin(at, SECONDS)
                    tokenizer.decode(tokenizer.encode(unit * length + ending).ids)
    except MemoryError:
        return f"needs more than {gb(MEMORY)} of memory {at}"
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        return f"fails {at} ({first_line(error)})"
    return ""


def _begin(at: str, seconds: float) -> None:
    """Tell what is tried, and end the process should it take longer, where the system can."""
    print(json.dumps({"trying": at}), flush=True)
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main(sys.argv[1])
