"""`medusa-chat train` and `medusa-chat calibrate`: their options, and their progress.

Results go to stdout (with --json every event, one per line), progress to stderr.
"""

import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from medusa_chat import paths
from medusa_chat.checkpoints.memory_needs import PRECISIONS
from medusa_chat.checkpoints.places import shipped_folder
from medusa_chat.cli.options import (
    PLACE,
    AsJson,
    DataDir,
    Device,
    LoadOptions,
    More,
    Offline,
    count,
    data_paths,
    file_path,
    flag,
    folder_path,
    prepare_process,
    value,
    values_of,
)
from medusa_chat.cli.terminal import (
    LINE_SECONDS,
    ProgressLine,
    json_line,
    note,
    require_writable,
    stopping,
)
from medusa_chat.errors import UsageError
from medusa_chat.runtime.history import FILE, History
from medusa_chat.training.conversations import Conversation
from medusa_chat.training.events import HiddenStates, RunLog, TrainStep
from medusa_chat.training.recipe import TrainRequest, read_recipe
from medusa_chat.trees.calibration import CALIBRATION_FILE
from medusa_chat.units import gb

ONLY_MEDUSA_2 = ("lambda0", "lambda0_schedule", "lora_rank", "lora_alpha", "lora_dropout")
NAMES = {
    "Stage": "stage",
    "Note": "note",
    "Plan": "plan",
    "Answered": "answered",
    "HiddenStates": "hidden",
    "TrainStep": "step",
    "Evaluated": "evaluated",
    "Calibration": "calibrated",
    "Measured": "measured",
    "Written": "written",
}
BAR = 20  # characters of the progress bar
FEW_POSITIONS = 1000  # measured on fewer, the tree is fitted to these answers
POOR = 1.15  # tokens per step
RECENT = (
    64  # events from which the speed is computed: answers reused from an earlier run cost nothing
)


# ---- train ----


@dataclass(frozen=True)
class TrainOptions:
    """The data, the output and the run; RecipeOptions override single settings of the recipe."""

    data: Annotated[
        list[str],
        value(
            "FILE|HUB_DATASET...",
            "Training data: ShareGPT, UltraChat, messages, MT-Bench or AlpacaEval as JSON, JSONL "
            "or parquet; or plain text.",
        ),
    ]
    output: Annotated[Path, folder_path("New folder for the checkpoint.")]
    more: More = None
    backbone: Annotated[str, value(PLACE, "Model to train heads for.")] = "demo"
    sequence_length: Annotated[
        int | None, count("Tokens per training example; longer ones are cut.", min=16)
    ] = None
    precision: Annotated[str, value("|".join(PRECISIONS), "Number format of the backbone.")] = (
        "auto"
    )
    device: Device = "auto"
    resume: Annotated[bool, flag("--resume", "Continue a stopped run of the same command.")] = False
    offline: Offline = False
    data_dir: DataDir = None
    as_json: AsJson = False
    recipe: Annotated[
        str, value("NAME|FILE", "Training settings; the options below override them.")
    ] = "default"


@dataclass(frozen=True)
class RecipeOptions:
    """Settings of a recipe, by the name of its field; None keeps the recipe's value."""

    method: Annotated[
        str | None, value("medusa-1|medusa-2", "Train the heads alone, or the backbone too.")
    ] = None
    heads: Annotated[int | None, count("Number of heads; five are enough.")] = None
    head_layers: Annotated[int | None, count("Residual layers per head.")] = None
    own_lm_head: Annotated[
        bool | None,
        flag(
            "--own-lm-head/--shared-lm-head",
            "Give each head its own LM head, or share the backbone's.",
        ),
    ] = None
    root: Annotated[
        bool | None,
        flag("--root/--no-root", "Also feed the heads the root, the token already decided."),
    ] = None
    distill: Annotated[
        bool | None, flag("--distill/--no-distill", "Train on the backbone's own answers.")
    ] = None
    self_talk: Annotated[
        int | None, count("With --distill: let the backbone write N more prompts.")
    ] = None
    epochs: Annotated[int | None, count("Passes over the data.")] = None
    max_steps: Annotated[int | None, count("Number of steps, instead of --epochs.")] = None
    batch_tokens: Annotated[int | None, count("Tokens per batch.")] = None
    learning_rate: Annotated[float | None, value("X", "Learning rate of the backbone.")] = None
    head_learning_rate_multiplier: Annotated[
        float | None, value("X", "The heads' learning rate as a multiple of the backbone's.")
    ] = None
    lambda0: Annotated[float | None, value("X", "Weight of the heads' loss with medusa-2.")] = None
    lambda0_schedule: Annotated[str | None, value("constant|sine", "Schedule of lambda0.")] = None
    decay: Annotated[float | None, value("X", "The loss of head k has the weight X^k.")] = None
    warmup_steps: Annotated[int | None, count("Steps until the full learning rate.")] = None
    lora_rank: Annotated[int | None, count("Rank of the LoRA adapter.")] = None
    lora_alpha: Annotated[int | None, count("Alpha of the LoRA adapter.")] = None
    lora_dropout: Annotated[float | None, value("X", "Dropout of the LoRA adapter.")] = None
    seed: Annotated[int | None, count("Seed of shuffling and sampling.")] = None


@dataclass(frozen=True)
class Train(RecipeOptions, TrainOptions):
    """Train Medusa heads for a model. Ctrl-C stops; --resume continues."""

    def run(self) -> int | None:
        """Check the options, then train; returns 130 if stopped."""
        recipe = read_recipe(self.recipe).changed(**values_of(RecipeOptions, self))
        unused = [name for name in ONLY_MEDUSA_2 if getattr(self, name) is not None]
        if unused and recipe.method != "medusa-2":
            option = unused[0].replace("_", "-")
            raise UsageError(f"--{option} needs --method medusa-2: add that, or omit --{option}")
        prepare_process(self.device, self.data_dir, self.offline, self.precision)
        request = TrainRequest(
            backbone=self.backbone,
            data=data_paths(self.data, self.more),
            output=self.output.expanduser(),
            recipe=recipe,
            precision=self.precision,
            device=self.device,
            offline=self.offline,
            resume=self.resume,
            sequence_length=self.sequence_length,
        )
        return run_training(request, self.as_json)


def run_training(request: TrainRequest, as_json: bool) -> int | None:
    """Train, and show every event; returns 130 if stopped."""
    from medusa_chat.training import run
    from medusa_chat.training.process_group import ProcessGroup

    group = ProcessGroup.join(request.device == "cpu")
    view = TrainingView(as_json, is_quiet=not group.is_first)
    # One of several processes cannot stop alone: the page has no Stop button for them.
    log = RunLog(request.output, can_stop=group.size == 1) if group.is_first else nullcontext()
    with stopping() as is_stopped, log, closing(run.train(request, group)) as events:
        for event in events:
            view.show(event)
            if isinstance(log, RunLog):
                log.tell(event_json(event), is_step=isinstance(event, (TrainStep, HiddenStates)))
            if is_stopped() or (isinstance(log, RunLog) and log.wants_stop()):
                events.close()
                if isinstance(log, RunLog):
                    log.stopped()
                kept = run.work_folder(request.output)
                view.say(f"stopped: {kept} is kept; continue with --resume")
                return 130
    return None


# ---- calibrate ----


@dataclass(frozen=True)
class CalibrateOptions:
    """The prompts to measure on, and the output."""

    data: Annotated[
        list[str] | None,
        value("FILE|HUB_DATASET...", "Prompts, in the formats of train; optional with --chats."),
    ] = None
    more: More = None
    chats: Annotated[bool, flag("--chats", "Measure on the chats saved by the page.")] = False
    nodes: Annotated[int, count("Nodes of the tree, including the root.", min=2, max=256)] = 64
    output: Annotated[Path | None, file_path("Default: the checkpoint's folder.")] = None
    as_json: AsJson = False


@dataclass(frozen=True)
class Calibrate(LoadOptions, CalibrateOptions):
    """Measure each head's accuracy on prompts, and search for the best tree."""

    def run(self) -> int | None:
        """Check the options, then measure; returns 130 if stopped."""
        request = self.load_request()
        if not self.data and not self.chats:
            raise UsageError("no prompts to measure on: give --data FILE or --chats")
        files = data_paths(self.data, self.more)
        file = calibration_file(request.checkpoint, self.output, files)
        chats = saved_chats() if self.chats else []
        from medusa_chat.training.calibration import calibrate

        view = TrainingView(self.as_json)
        events = calibrate(request, files, self.nodes, file, chats)
        with stopping() as is_stopped, closing(events):
            for event in events:
                view.show(event)
                if is_stopped():
                    view.say("stopped: nothing was written")
                    return 130
        return None


def calibration_file(checkpoint: str, output: Path | None, inputs: Sequence[Path] = ()) -> Path:
    """Where to write the calibration. inputs: files that must not be overwritten. Raises
    UsageError, before anything is loaded."""
    if output is None:
        folder = Path(checkpoint).expanduser()
        if shipped_folder(checkpoint) is not None or not folder.is_dir():
            raise UsageError(f"{checkpoint} is not a local folder: give --output FILE")
        output = folder / CALIBRATION_FILE
    require_writable(output, *inputs)
    return output


def saved_chats() -> list[Conversation]:
    """The chats saved by the page. Raises UsageError if there are none."""
    chats: list[Conversation] = []
    for number, stored in enumerate(History(paths.data_dir() / FILE).all(), start=1):
        system = ({"role": "system", "content": stored.system},) if stored.system.strip() else ()
        chat = Conversation((*system, *stored.messages), f"chat {number}")
        if chat.asked:
            chats.append(chat)
    if not chats:
        raise UsageError("there are no saved chats: chat in the page first, or give --data")
    return chats


# ---- progress ----


def event_json(event: Any) -> str:
    """An event as one line of JSON, {"event": NAME, ...}; without the training examples."""
    values = asdict(event)
    for name in ("example", "said", "place"):
        values.pop(name, None)
    if hasattr(event, "expected"):
        values["expected"] = event.expected
    return json_line({"event": NAMES[type(event).__name__], **values})


class TrainingView:
    """Prints the events of a training or a calibration, as text or JSON."""

    def __init__(self, as_json: bool, is_quiet: bool = False) -> None:
        self.as_json, self.is_quiet = as_json, is_quiet
        self.is_terminal, self.line = sys.stderr.isatty(), ProgressLine()
        self._begin()

    def _begin(self) -> None:
        """Start the clock of a stage."""
        self.printed_at, self.tokens = time.monotonic(), 0
        # (time, answers, steps or examples done, their tokens)
        self.recent = deque([(self.printed_at, 0, 0)], maxlen=RECENT)

    def say(self, line: str) -> None:
        """Print a permanent line to stderr."""
        if not self.is_quiet:
            self.line.clear()
            note(line)

    def show(self, event: Any) -> None:
        """Print an event."""
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
        if not self.tokens:  # the steps before a resume do not count
            self.recent[0] = self.recent[0][0], event.step - 1, 0
        speed, left = self._pace(event.step, event.steps, self.tokens + event.labels)
        lm = "" if event.lm_loss is None else f" (backbone {event.lm_loss:.3f})"
        text = (
            f"step {event.step}/{event.steps}  {left}  {speed}  "
            f"loss {event.loss:.3f}{lm}  top-1 {accuracy_text(row[:1] for row in event.top)}"
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
            self._begin()  # the training steps follow

    def _pace(self, done: int, total: int, tokens: int) -> tuple[str, str]:
        """(tokens per second, time left), from the most recent events. tokens: in this stage."""
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
        elif done >= total or time.monotonic() - self.printed_at > LINE_SECONDS:
            self.printed_at = time.monotonic()
            note(text)


def accuracy_text(top: Iterable[Sequence[float]]) -> str:
    """Each head's top-1, top-2, ... accuracy; heads are separated by "|"."""
    return " | ".join(" ".join(f"{share:.2f}".removeprefix("0") for share in row) for row in top)


def evaluated_line(event: Any) -> str:
    lm = "" if event.lm_loss is None else f", backbone loss {event.lm_loss:.3f}"
    return f"held out after step {event.step}: top-1..5 {accuracy_text(event.top)}{lm}"


def plan_lines(event: Any) -> list[str]:
    return [
        f"{event.method} for {event.backbone} on {event.device} at {event.precision}, "
        f"recipe {event.recipe}",
        f"data     {event.rows:,} training rows, {event.held_out:,} held out; {event.tokens:,} "
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
    expected = ", ".join(f"{tokens:.2f} with {n}" for n, tokens in event.expected.items())
    lines.append(f"expected tokens per step, by nodes: {expected}")
    if max(event.expected.values(), default=1.0) < POOR:
        lines.append("almost nothing that these heads draft is accepted: train them longer")
    elif event.positions < FEW_POSITIONS:
        lines.append(
            f"measured on only {event.positions} positions, so too high: measure again on other "
            "prompts with medusa-chat calibrate"
        )
    return lines


def measured_lines(event: Any) -> list[str]:
    return [
        f"{nodes:>4} nodes: {expected:.2f} tokens per step expected, {measured:.2f} measured"
        for nodes, expected, measured in event.sizes
    ]


def written_lines(event: Any) -> list[str]:
    lines = [f"wrote {event.folder} ({gb(event.bytes)})"]
    if event.answers:
        lines.append(f"the backbone's answers are in {event.answers}: reuse them with --data")
    return lines


def duration(seconds: float) -> str:
    """Seconds as text."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
