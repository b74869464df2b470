"""LlamaBench: llama.cpp's own benchmark, as it is installed here."""

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from medusa_chat.bench.file_process import peak_of

PROGRAM = "llama-bench"
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
        """Tokens a second of so many tokens behind an empty context, without the load, after its
        own warm-up; the peak of its memory in bytes, 0 where unknown. Raises LlamaBenchFailed."""
        found = shutil.which(self.program or PROGRAM)
        if found is None:
            raise LlamaBenchFailed(f"there is no {self.program or PROGRAM}: {REMEDY}")
        layers = "0" if device == "cpu" else "99"  # on a GPU
        sizes = ["-t", str(threads), "-p", "0", "-n", str(tokens), "-r", "1", "-ngl", layers]
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
        return speed, peak


def _watched(process: "subprocess.Popen[str]") -> tuple[tuple[str, str], int]:
    """What the process printed, and the peak of its memory while it ran."""
    peak = 0
    while True:
        try:
            return process.communicate(timeout=0.05), peak
        except subprocess.TimeoutExpired:
            peak = max(peak, peak_of(process.pid))
