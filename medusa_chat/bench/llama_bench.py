"""LlamaBench: llama.cpp's own benchmark, as it is installed here."""

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from medusa_chat.bench.file_process import peak_of

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PROGRAM = "llama-bench"
FEW = 4  # tokens
REMEDY = (
    "install llama.cpp (its releases on GitHub, or brew, winget, nix), so that llama-bench is on "
    "the PATH, or name it with --llama-bench FILE"
)


class LlamaBenchFailed(Exception):
    """It gave no figure; the message says why."""


@dataclass
class LlamaBench:
    """program: the file, or a name on the PATH. version: what it was built from, once it ran."""

    program: Path | None = None
    version: str = field(default="not run", init=False)

    def run(self, file: Path, tokens: int, threads: int, device: str) -> tuple[float, int]:
        """Tokens a second of so many tokens behind an empty context, without the load; the peak of
        its memory in bytes, 0 where unknown. With one thread the seconds are the processor's, by
        the difference to a run of FEW tokens, where the system tells them. Raises
        LlamaBenchFailed."""
        if threads > 1 or resource is None:
            return self._once(file, tokens, threads, device)[:2]
        _, peak, seconds = self._once(file, tokens + FEW, threads, device)
        less = self._once(file, FEW, threads, device)[2]
        return tokens / max(seconds - less, 1e-9), peak

    def _once(self, file: Path, tokens: int, threads: int, device: str) -> tuple[float, int, float]:
        """As `run`, by the clock; and the processor's seconds of the whole process, 0 where
        unknown."""
        found = shutil.which(self.program or PROGRAM)
        if found is None:
            raise LlamaBenchFailed(f"there is no {self.program or PROGRAM}: {REMEDY}")
        layers = "0" if device == "cpu" else "99"  # on a GPU
        sizes = ["-t", str(threads), "-p", "0", "-n", str(tokens), "-r", "1", "-ngl", layers]
        before = _processor_seconds()
        command = [found, "-m", str(file), *sizes, "-o", "json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            with subprocess.Popen(command, text=True, **pipes) as process:
                said, peak = _watched(process)
        except OSError as error:
            raise LlamaBenchFailed(f"{found} does not start: {error.strerror}") from error
        if process.returncode:
            last = (said[1].strip().splitlines() or ["it printed nothing"])[-1]
            raise LlamaBenchFailed(f"{found} ended with {process.returncode}: {last[:300]}")
        try:
            (result,) = json.loads(said[0])
            speed = float(result["avg_ts"])
        except (ValueError, KeyError, TypeError) as error:
            raise LlamaBenchFailed(f"{found} printed no JSON with avg_ts: {error}") from None
        backends = result.get("backends", "")
        self.version = f"commit {result.get('build_commit', 'unknown')}, {backends}".rstrip(", ")
        return speed, peak, _processor_seconds() - before


def _processor_seconds() -> float:
    """Of all processes that were started here and have ended; 0 on Windows."""
    if resource is None:
        return 0.0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _watched(process: "subprocess.Popen[str]") -> tuple[tuple[str, str], int]:
    """What the process printed, and the peak of its memory while it ran."""
    peak = 0
    while True:
        try:
            return process.communicate(timeout=0.05), peak
        except subprocess.TimeoutExpired:
            peak = max(peak, peak_of(process.pid))
