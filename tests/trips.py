"""How many of our functions and files four ordinary requests pass through.

    python tests/trips.py [--list] [TRIP...]

Each trip runs in a process of its own on the demo, without a GPU or a network. Counted are the
functions of medusa_chat that are called, each once however often it runs: no comprehensions, no
bodies of modules and classes, and a generator that is resumed is still the one function. A load, a
training and the answer are counted from the command or call to its end; a step is the second of an
answer; of `generate` only the functions that are handed its temperature, up to the first token
that is drawn with it.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).parent.parent / "medusa_chat"
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
IS_FUNCTION = 0x1  # CO_OPTIMIZED: neither a module nor the body of a class
TEMPERATURE = 0.73125  # exact in binary, and no other value of ours
DEPTH = 3  # how deep in an argument's fields the temperature is looked for


class Trip:
    """The functions that are called while it records. carries: which calls count; None: all."""

    def __init__(self, carries: Callable[[FrameType], bool] | None = None) -> None:
        self.codes: set[CodeType] = set()
        self._carries, self._is_over = carries, False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record in this thread and in those that start."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or self._is_over:
            return
        if self._carries is not None and code.co_qualname == "Prefilled.__init__":
            self._is_over = True  # the first token is drawn
        if not code.co_filename.startswith(f"{PACKAGE}{os.sep}") or code in self.codes:
            return
        if not code.co_flags & IS_FUNCTION or code.co_name in COMPREHENSIONS:
            return
        if self._carries is None or self._carries(frame):
            self.codes.add(code)

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.codes}


def is_handed_the_temperature(frame: FrameType) -> bool:
    """Whether an argument of the call is it, or holds it."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
    return any(holds(frame.f_locals[name], DEPTH) for name in names if name in frame.f_locals)


def holds(value: Any, depth: int) -> bool:
    if isinstance(value, (float, str)):
        return value in (TEMPERATURE, str(TEMPERATURE))
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return depth > 0 and any(holds(one, depth - 1) for one in value[:64])
    if type(value).__name__ == "Tensor":
        return value.numel() == 1 and value.is_floating_point() and float(value) == TEMPERATURE
    is_ours = type(value).__module__.startswith("medusa_chat")
    fields = list(getattr(value, "__dict__", {}).values()) if is_ours else []
    return depth > 0 and any(holds(one, depth - 1) for one in fields)


def load_trip() -> Trip:
    """A plain load of the demo."""
    from medusa_chat.checkpoints.load import load
    from medusa_chat.messages import LoadRequest

    trip = Trip()
    with trip.recorded():
        for _ in load(LoadRequest("demo", device="cpu")):
            pass
    return trip


def step_trip() -> Trip:
    """A native step with heads."""
    from medusa_chat.checkpoints.load import load
    from medusa_chat.decoding.events import Step
    from medusa_chat.decoding.settings import GenerationSettings
    from medusa_chat.decoding.tree import Tree
    from medusa_chat.messages import LoadRequest

    *_, (_, loaded) = load(LoadRequest("demo", device="cpu"))
    assert loaded is not None
    tree = Tree.from_choices([(0,), (0, 0), (1,)])
    settings = GenerationSettings(drafter="medusa", nodes=len(tree), seed=0)
    ids = loaded.tokenizer("Once upon a time")["input_ids"]
    events = loaded.engine.generate(ids, loaded.engine.drafter(settings, tree), settings)
    next(events), next(events)
    trip = Trip()
    with trip.recorded():
        step = next(events)
    assert isinstance(step, Step)
    return trip


def train_trip() -> Trip:
    """`train --max-steps 2` of the demo."""
    said = "the hedgehog heard her and hid under a heap of leaves until the morning came"
    talk = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": said}]
    with tempfile.TemporaryDirectory() as folder:
        data, output = Path(folder) / "data.jsonl", Path(folder) / "heads"
        data.write_text(f"{json.dumps({'messages': talk})}\n" * 8, "utf-8")
        options = ["--data", str(data), "--output", str(output), "--max-steps", "2"]
        return command_trip(Trip(), ["train", *options, "--device", "cpu"])


def temperature_trip() -> Trip:
    """The temperature, from `generate` to the rule that uses it."""
    asked = ["--temperature", str(TEMPERATURE), "--max-new-tokens", "2", "--seed", "1"]
    line = ["generate", "--prompt", "Once", *asked, "--device", "cpu"]
    return command_trip(Trip(is_handed_the_temperature), line)


def command_trip(trip: Trip, line: list[str]) -> Trip:
    """A command of ours in this process."""
    from medusa_chat.cli.main import main

    told = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(told), trip.recorded():
        code = main(line)
    assert code == 0, told.getvalue()
    return trip


TRIPS = {
    "load": load_trip,
    "step": step_trip,
    "train": train_trip,
    "temperature": temperature_trip,
}


def report(name: str, lists: bool) -> None:
    trip = TRIPS[name]()
    title = (TRIPS[name].__doc__ or "").rstrip(".")
    print(f"{name:12} {len(trip.codes):4} functions in {len(trip.files):3} files  {title}")
    for file in sorted(trip.files) if lists else ():
        names = sorted(code.co_qualname for code in trip.codes if code.co_filename == file)
        print(f"  {Path(file).relative_to(PACKAGE)}: {', '.join(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="How many functions and files requests take.")
    parser.add_argument("trips", nargs="*", metavar="TRIP", help=f"of {', '.join(TRIPS)}; or all")
    parser.add_argument("--list", action="store_true", help="also name the functions by file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        report(asked.trips[0], asked.list)
        return
    with tempfile.TemporaryDirectory() as folder:
        own = {"MEDUSA_CHAT_DATA_DIR": folder, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        root = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        lists = ["--list"] if asked.list else []
        for name in asked.trips or TRIPS:
            line = [sys.executable, __file__, name, "--here", *lists]
            subprocess.run(line, env={**os.environ, **own, "PYTHONPATH": root}, check=True)


if __name__ == "__main__":
    main()
