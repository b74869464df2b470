"""The progress of a training in a terminal: a progress bar, lines, or JSON."""

import sys
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from medusa_chat.cli.progress_line import LINE_SECONDS, ProgressLine, note
from medusa_chat.cli.terminal import json_line
from medusa_chat.units import gb

NAMES = {
    "Stage": "stage",
    "Note": "note",
    "Plan": "plan",
    "Answered": "answered",
    "HiddenStates": "hidden",
    "TrainStep": "step",
    "Evaluated": "evaluated",
    "Calibrated": "calibrated",
    "Measured": "measured",
    "Written": "written",
}
BAR = 20
FEW_POSITIONS = 1000  # of held-out answers: the tree is made for them, and fits others less well
POOR = 1.15  # tokens a step
RECENT = 64  # events whose speed is shown; answers that an earlier run left come at once


def event_json(event: Any) -> str:
    """{"event": its name, ...} in one line. Training examples are not repeated."""
    values = asdict(event)
    for name in ("example", "said", "place"):
        values.pop(name, None)
    if hasattr(event, "expected"):
        values["expected"] = event.expected
    return json_line({"event": NAMES[type(event).__name__], **values})


class TrainingView:
    """Folds the events of a training or a calibration into lines."""

    def __init__(self, as_json: bool, is_quiet: bool = False) -> None:
        self.as_json, self.is_quiet = as_json, is_quiet
        self.is_terminal, self.line = sys.stderr.isatty(), ProgressLine()
        self._begin()

    def _begin(self) -> None:
        """Begin a stage, whose speed is measured from here."""
        self.told, self.tokens = time.monotonic(), 0
        # when answers, steps or examples were done, how many there were, and their tokens
        self.recent = deque([(self.told, 0, 0)], maxlen=RECENT)

    def say(self, line: str) -> None:
        """One line that stays, on stderr."""
        if not self.is_quiet:
            self.line.clear()
            note(line)

    def show(self, event: Any) -> None:
        """The event as JSON or words."""
        if self.is_quiet:
            return
        if self.as_json:
            print(event_json(event), flush=True)
            return
        name = NAMES[type(event).__name__]
        if name == "stage":
            self._begin()
            self.say(f"{event.name} ...")
        elif name == "note":
            self.say(f"note     {event.line}")
        elif name == "step":
            self._step(event)
        elif name == "answered":
            self._answered(event)
        elif name == "hidden":
            self._hidden(event)
        elif name == "evaluated":
            self.say(evaluated_line(event))
        else:
            self.line.clear()
            for line in {
                "plan": plan_lines,
                "calibrated": calibrated_lines,
                "measured": measured_lines,
                "written": written_lines,
            }[name](event):
                print(line, flush=True)

    def _step(self, event: Any) -> None:
        if not self.tokens:  # steps of an earlier, resumed run do not count
            self.recent[0] = self.recent[0][0], event.step - 1, 0
        speed, left = self._pace(event.step, event.steps, self.tokens + event.labels)
        lm = "" if event.lm_loss is None else f" (backbone {event.lm_loss:.3f})"
        text = (
            f"step {event.step}/{event.steps}  {left}  {speed}  "
            f"loss {event.loss:.3f}{lm}  top-1 {heads_shown(row[:1] for row in event.top)}"
        )
        self._progress(event.step, event.steps, text)

    def _answered(self, event: Any) -> None:
        pace = "  ".join(self._pace(event.done, event.total, event.tokens))
        text = f"answer {event.done}/{event.total}  {event.tokens:,} tokens  {pace}"
        self._progress(event.done, event.total, text)

    def _hidden(self, event: Any) -> None:
        pace = "  ".join(self._pace(event.done, event.total, event.tokens))
        text = f"hidden states of {event.done:,}/{event.total:,} examples  {pace}"
        self._progress(event.done, event.total, text)
        if event.done == event.total:
            self._begin()  # the time of the steps begins

    def _pace(self, done: int, total: int, tokens: int) -> tuple[str, str]:
        """(tokens a second, time left), by what came last. tokens: of the stage so far."""
        now, (since, before, counted) = time.monotonic(), self.recent[0]
        self.recent.append((now, done, tokens))
        self.tokens, seconds = tokens, max(now - since, 1e-9)
        left = duration((total - done) * seconds / (done - before))
        return f"{(tokens - counted) / seconds:,.0f} tokens/s", f"{left} left"

    def _progress(self, done: int, total: int, text: str) -> None:
        if self.is_terminal:
            full = BAR * done // max(total, 1)
            bar = "#" * full + "-" * (BAR - full)
            self.line.show(f"[{bar}] {text}")
        elif done >= total or time.monotonic() - self.told > LINE_SECONDS:
            self.told = time.monotonic()
            note(text)


def heads_shown(top: Any) -> str:
    """Each head's top-1 to top-5 accuracy, heads separated by "|"."""
    return " | ".join(" ".join(f"{share:.2f}".removeprefix("0") for share in row) for row in top)


def evaluated_line(event: Any) -> str:
    lm = "" if event.lm_loss is None else f", backbone's loss {event.lm_loss:.3f}"
    return f"held out after step {event.step}: top-1..5 {heads_shown(event.top)}{lm}"


def plan_lines(event: Any) -> list[str]:
    return [
        f"{event.method} for {event.backbone} on {event.device} at {event.precision}, "
        f"recipe {event.recipe}",
        f"data     {event.rows:,} rows to learn, {event.held_out:,} held out; {event.tokens:,} "
        f"tokens, {event.labels:,} of them labels",
        f"steps    {event.steps:,}",
        f"memory   about {gb(event.memory_bytes)}",
        f"disk     about {gb(event.disk_bytes)} of {gb(event.free_bytes)} free",
        *(f"note     {sentence}" for sentence in event.notes),
    ]


def calibrated_lines(event: Any) -> list[str]:
    lines = [f"measured on {event.measured_on}: {event.positions:,} positions"]
    for head, row in enumerate(event.accuracies, start=1):
        shown = " ".join(f"{sum(row[: i + 1]):.3f}" for i in range(min(5, len(row))))
        lines.append(f"head {head}   top-1..5 {shown}")
    promised = ", ".join(f"{tokens:.2f} with {n}" for n, tokens in event.expected.items())
    lines.append(f"tokens a step expected, by nodes: {promised}")
    if max(event.expected.values(), default=1.0) < POOR:
        lines.append("these heads draft next to nothing that is accepted: train longer")
    elif event.positions < FEW_POSITIONS:
        lines.append(
            f"that is of {event.positions} positions alone, and too high: measure it on other "
            "prompts with medusa-chat calibrate"
        )
    return lines


def measured_lines(event: Any) -> list[str]:
    return [
        f"{nodes:>4} nodes: {expected:.2f} tokens a step expected, {measured:.2f} measured"
        for nodes, expected, measured in event.sizes
    ]


def written_lines(event: Any) -> list[str]:
    lines = [f"{event.folder} is written ({gb(event.bytes)})"]
    if event.answers:
        lines.append(f"the backbone's answers: {event.answers}; train on them again with --data")
    return lines


def duration(seconds: float) -> str:
    """Seconds as text."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
