"""TokenizerTrial: a tokenizer.json read and used in a limited process before our own one uses it.

A regular expression in it may run forever, and a broken part may end the process, or raise what is
not an Exception, at the first text that reaches it. The trial finds out within a second. Those that
passed are remembered by their content, and not tried again.
"""

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.checkpoints.process_limits import environment, limit_memory
from medusa_chat.errors import ModelError, first_line, is_panic
from medusa_chat.units import gb

FILE = "tokenizer.json"
# types of parts that hold neither expressions nor tables: they need no trial
PLAIN = {b"BPE", b"ByteLevel", b"TemplateProcessing", b"Sequence", b"Metaspace", b"Fuse", b"NFC"}
KIND = re.compile(rb'"type"\s*:\s*"(\w+)"')
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
GROUPS = ("normalizers", "pretokenizers", "processors", "decoders")  # parts of a Sequence
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
SECONDS = 2  # processor time for one text; usual tokenizers take 5 ms for the longest
READING = 60  # processor time to read the file; Gemma's 35 MB take a second
READ = "when it is read"
PATIENCE = 300  # wall-clock seconds for the whole trial, on a busy machine
MEMORY, GROWTH = 1 << 30, 64  # bytes allowed: MEMORY plus GROWTH times the size of the file
UNITS = (
    *("a", "A", " ", "\n", "0", ".", "'", "_", "\u00e9", "\u4e2d", "\u0301", "\U0001f642"),
    *("ab ", " a", "a0", "A.\n", "<|", "\u2581"),
)
LENGTHS = (1, 24, 128, 2048)  # 2^n steps show at the short lengths, n^3 at the long ones
ENDINGS = ("", "!")
TIMED_OUT = -signal.SIGPROF if hasattr(signal, "SIGPROF") else None  # the exit code
PASSED = "passed_tokenizers.json"  # in the cache: a list of digests, the latest last
MOST_PASSED = 500


class TokenizerTrial:
    """The trial of a folder's tokenizer.json, started at once. `close` ends its process."""

    def __init__(self, folder: Path, plain_too: bool = False) -> None:
        """Starts no process where there is no such file or it has passed before, nor, unless
        plain_too, for a tokenizer of plain parts alone. Raises ModelError where no process can be
        started."""
        self._folder = folder
        self._child: subprocess.Popen[str] | None = None
        file = folder / FILE
        if not file.is_file():
            return
        self._digest = _digest(file)
        if self._digest in _passed() or not (plain_too or is_suspect(file)):
            return
        command = [sys.executable, "-P", "-m", __name__, str(file)]
        nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE  # Rust libraries report to stderr
        try:
            self._child = subprocess.Popen(
                command, stdin=nowhere, stdout=pipe, stderr=nowhere, env=environment(), text=True
            )
        except OSError as error:
            raise ModelError(f"the tokenizer in {folder} cannot be tried: {error}") from error

    def refuse(self) -> None:
        """Wait for the end. Raises ModelError, in one line, where the tokenizer failed, and, saying
        so, where the machine was too busy to tell."""
        if self._child is None:
            return
        try:
            output, _ = self._child.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise ModelError(
                f"the tokenizer in {self._folder} was not checked within {PATIENCE} seconds: try "
                "again when the machine is less busy, or use another checkpoint"
            ) from error
        finally:
            code = self._child.poll()
            self.close()
        lines = [json.loads(line) for line in output.splitlines() if line.endswith("}")]
        last = lines[-1] if lines else {"trying": READ}
        if "trying" in last:  # the process ended there
            how = "takes too long" if code == TIMED_OUT else "ends the process"
            refuse_problem(self._folder, f"{how} {last['trying']}")
        else:
            refuse_problem(self._folder, last["problem"])
            _remember(self._digest)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            if self._child.stdout is not None:
                self._child.stdout.close()
            self._child = None


def _digest(file: Path) -> str:
    """A name for a tokenizer.json and for what reads it."""
    found = hashlib.sha256(file.read_bytes())
    found.update(f"{metadata.version('tokenizers')} {UNITS} {LENGTHS} {ENDINGS}".encode())
    return found.hexdigest()


def _passed() -> list[str]:
    """The digests of those that passed; a list that cannot be read is none."""
    try:
        found = json.loads((paths.cache_dir() / PASSED).read_bytes())
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _remember(digest: str) -> None:
    """A cache that cannot be written only costs time."""
    passed = [one for one in _passed() if one != digest]
    with suppress(OSError):
        text = json.dumps([*passed, digest][-MOST_PASSED:])
        paths.write_text(paths.cache_dir() / PASSED, text)


def refuse_problem(folder: Path, problem: str) -> None:
    """Raises ModelError where there is a problem."""
    if problem:
        raise ModelError(
            f"the tokenizer in {folder} {problem}: it is broken or malicious, use another "
            "checkpoint"
        )


def is_suspect(file: Path) -> bool:
    """Whether a part has a type that is not plain, or no type: it is then recognised by its other
    keys."""
    data = file.read_bytes()
    if not PLAIN.issuperset(KIND.findall(data)):  # without parsing 35 MB
        return True
    try:
        values = json.loads(data)
        parts = {name: values[name] for name in PARTS if values.get(name) is not None}
        has_affix = any(parts["model"].get(name) for name in AFFIXES)
        return has_affix or not PLAIN.issuperset(_kinds(list(parts.values())))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return True  # the trial finds out what it is


def _kinds(parts: list[Any]) -> Iterator[bytes]:
    for part in parts:
        yield str(part.get("type")).encode()
        for group in GROUPS:
            yield from _kinds(part.get(group, []))


def main(file: str) -> None:
    """Try the tokenizer: prints a line before each text, and one with the problem at the end."""
    limit_memory(MEMORY + GROWTH * Path(file).stat().st_size)
    print(json.dumps({"problem": problem_of(Path(file))}), flush=True)


def problem_of(file: Path) -> str:
    """Why the tokenizer cannot be used; "" where it can."""
    from tokenizers import Tokenizer  # in the child alone: the page starts trials, too

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
    """Report what is tried, and have the system end the process if it takes longer, where it can
    (Windows cannot)."""
    print(json.dumps({"trying": at}), flush=True)
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main(sys.argv[1])
