"""The runner of gpu.py: every part in a process of its own, within its time; JSON after each.

Neighbouring parts whose times do not matter run side by side."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from time import monotonic, strftime
from typing import Any

from gpu_part import written

CHILD = Path(__file__).parent / "gpu_part.py"
DONE, NOT_RUN = "done", "not run: time was up"
LEAST = 1 / 3  # a part begins only where so much of its time limit is left
LAST_WORDS = 5  # seconds that a part has to say where it was when its time was up
SIDE_BY_SIDE = os.cpu_count() or 1  # parts that are not timed
SAID = 12_000  # characters of what a part printed that are kept
# of this machine, which a file that is passed on need not tell
PLACES = tuple(f"{place}{os.sep}" for place in (CHILD.parents[2], sysconfig.get_path("purelib")))


@dataclass(frozen=True)
class Part:
    """call: "module:function", a generator of (name, value) in a file beside this one. seconds: its
    time limit. options: of the function. needs: packages without which it is left out. is_timed:
    whether nothing else may run meanwhile."""

    name: str
    call: str
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    is_timed: bool = True


def run_parts(
    parts: Sequence[Part],
    out: Path,
    options: dict[str, Any],
    minutes: float,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Run parts in order -> after each the report so far, which is in the file `out` by then.
    options: fields of gpu_part.Bench. minutes: for all parts."""
    end = monotonic() + 60 * minutes
    report: dict[str, Any] = {"began": strftime("%Y-%m-%dT%H:%M:%S%z"), **options, "parts": {}}
    with tempfile.TemporaryDirectory(prefix="medusa-chat-gpu-") as folder:
        environment = _environment(Path(folder), options["is_dry"])

        def run(part: Part, known: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            left = end - monotonic()
            if left < part.seconds * LEAST:
                return part.name, {"outcome": NOT_RUN}
            progress(f"{part.name} ...")
            limit = min(part.seconds, left)
            return part.name, _run(part, options, known, Path(folder), limit, environment)

        for side_by_side in _groups(parts):
            with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
                known = dict(report["parts"])
                for done in as_completed([pool.submit(run, one, known) for one in side_by_side]):
                    name, found = done.result()
                    progress(f"{name}: {found['outcome']}, {found.get('seconds', 0)} s")
                    report["parts"][name] = found
                    written(out, report)
                    yield report


def _groups(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Neighbours that may run side by side; each part that is timed alone."""
    for is_timed, group in groupby(parts, lambda part: part.is_timed):
        beside = list(group)
        yield from ([part] for part in beside) if is_timed else [beside]


def _environment(folder: Path, is_dry: bool) -> dict[str, str]:
    """Nothing is kept beyond the run nor fetched; a dry run computes as on a GPU, without our C."""
    fixed = {
        "MEDUSA_CHAT_DATA_DIR": str(folder / "data"),
        "HF_HUB_OFFLINE": "1",
        "KINETO_LOG_LEVEL": "99",  # the profiler tells every begin and end
    }
    return os.environ | fixed | ({"MEDUSA_CHAT_NATIVE": "0"} if is_dry else {})


def _run(
    part: Part,
    options: dict[str, Any],
    known: dict[str, Any],
    folder: Path,
    limit: float,
    environment: dict[str, str],
) -> dict[str, Any]:
    """A part in a process of its own -> how it ended, its seconds, what it found until then and, if
    it printed anything, the end of that."""
    into, before, said = (folder / f"{part.name}.{kind}" for kind in ("json", "known", "said"))
    written(before, {name: one.get("found", {}) for name, one in known.items()})
    asked = json.dumps([part.call, options, part.options, part.needs])
    began = monotonic()
    with open(said, "wb") as stream:
        child = subprocess.Popen(
            [sys.executable, CHILD, asked, before, into],
            **{"stdout": stream, "stderr": stream, "stdin": subprocess.DEVNULL},
            **{"env": environment, "start_new_session": True},
        )
        try:
            outcome = _outcome(child.wait(limit))
        except subprocess.TimeoutExpired:
            outcome = f"stopped at its time limit of {limit:.0f} s"
            child.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(LAST_WORDS)
            _end(child)
        finally:
            if child.poll() is None:
                _end(child)
    found: dict[str, Any] = {"outcome": outcome, "seconds": round(monotonic() - began, 1)}
    if into.exists():
        found |= json.loads(into.read_text("utf-8"))
    if text := said.read_text("utf-8", "replace").strip():
        for place in PLACES:
            text = text.replace(place, "")
        found["said"] = text[-SAID:]
    return found


def _outcome(code: int) -> str:
    if code == 0:
        return DONE
    return f"killed by {signal.Signals(-code).name}" if code < 0 else "failed"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
