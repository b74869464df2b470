"""`medusa-chat train` and `medusa-chat calibrate`: parse, run, and tell how it goes.

Results go to stdout (with --json every event, a line each), progress to stderr.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from medusa_chat.checkpoints.precision import PRECISIONS
from medusa_chat.cli.options import AsJson, DataDir, Device, load_options, place, takes
from medusa_chat.cli.terminal import require_folder
from medusa_chat.cli.training_progress import TrainingView, event_json
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.training.recipe import Recipe, TrainRequest, read_recipe
from medusa_chat.training.run_log import RunLog

if TYPE_CHECKING:
    from medusa_chat.training.conversations import Conversation

Data = Annotated[
    list[str],
    Option(
        metavar="FILE|HUB_DATASET...",
        help="ShareGPT, UltraChat, messages, MT-Bench, AlpacaEval (JSON, JSONL, parquet), text.",
    ),
]
OtherData = Annotated[
    list[str] | None,
    Option(metavar="FILE|HUB_DATASET...", help="As for train; not needed with --chats."),
]
More = Annotated[list[str] | None, Argument(metavar="", hidden=True)]


def recipe_options(
    recipe: Annotated[
        str, Option(metavar="NAME|FILE", help="Settings; every option below changes one.")
    ] = "default",
    method: Annotated[
        str | None, Option(metavar="medusa-1|medusa-2", help="Heads alone, or the backbone too.")
    ] = None,
    heads: Annotated[int | None, Option(metavar="N", help="Five are enough.")] = None,
    head_layers: Annotated[int | None, Option(metavar="N", help="Residual layers.")] = None,
    own_lm_head: Annotated[
        bool | None, Option("--own-lm-head/--shared-lm-head", help="An LM head for each head.")
    ] = None,
    distill: Annotated[
        bool | None,
        Option("--distill/--no-distill", help="The backbone answers the prompts itself."),
    ] = None,
    self_talk: Annotated[
        int | None, Option(metavar="N", help="With --distill: N more questions of its own.")
    ] = None,
    soft_targets: Annotated[
        int | None, Option(metavar="K", help="Learn the backbone's K likeliest tokens, not one.")
    ] = None,
    epochs: Annotated[int | None, Option(metavar="N", help="Times through the data.")] = None,
    max_steps: Annotated[int | None, Option(metavar="N", help="Instead of --epochs.")] = None,
    batch_tokens: Annotated[int | None, Option(metavar="N", help="Tokens of a batch.")] = None,
    learning_rate: Annotated[float | None, Option(metavar="X", help="The backbone's.")] = None,
    head_learning_rate_multiplier: Annotated[
        float | None, Option(metavar="X", help="The heads' rate is so many times that.")
    ] = None,
    lambda0: Annotated[
        float | None, Option(metavar="X", help="Weight of the heads' loss in medusa-2.")
    ] = None,
    lambda0_schedule: Annotated[
        str | None, Option(metavar="constant|sine", help="Whether it grows.")
    ] = None,
    decay: Annotated[float | None, Option(metavar="X", help="Head k weighs decay^k.")] = None,
    warmup_steps: Annotated[int | None, Option(metavar="N", help="Steps to full rate.")] = None,
    lora_rank: Annotated[int | None, Option(metavar="N", help="Of the adapter.")] = None,
    lora_alpha: Annotated[int | None, Option(metavar="N", help="Of the adapter.")] = None,
    lora_dropout: Annotated[float | None, Option(metavar="X", help="Of the adapter.")] = None,
    seed: Annotated[int | None, Option(metavar="N", help="Of shuffling and sampling.")] = None,
) -> Recipe:
    """The recipe with what the command line changes. Raises UsageError."""
    chosen = locals()
    return read_recipe(chosen.pop("recipe")).changed(**chosen)


@takes(recipe=recipe_options)
def train(
    recipe: Recipe,
    data: Data,
    output: Annotated[Path, Option(metavar="DIR", help="The new checkpoint; must not exist.")],
    more: More = None,
    backbone: Annotated[str, Option(metavar="ID|DIR", help="The model that gets heads.")] = "demo",
    sequence_length: Annotated[
        int | None, Option(metavar="N", min=16, help="Longest row; longer ones are cut.")
    ] = None,
    precision: Annotated[
        str, Option(metavar="|".join(PRECISIONS), help="The backbone's number format.")
    ] = "auto",
    device: Device = "auto",
    resume: Annotated[
        bool, Option("--resume", help="Go on where the same command was stopped.")
    ] = False,
    offline: Annotated[bool, Option("--offline", help="Never use the network.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int | None:
    """Make Medusa heads for a model. Ctrl-C stops; --resume goes on."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}: choose one of {', '.join(PRECISIONS)}")
    prepare(device, data_dir, offline)
    request = TrainRequest(
        backbone=backbone,
        data=data_paths([*data, *(more or [])]),
        output=output.expanduser(),
        recipe=recipe,
        precision=precision,
        device=device,
        offline=offline,
        resume=resume,
        sequence_length=sequence_length,
    )
    from medusa_chat.training import run
    from medusa_chat.training.process_group import ProcessGroup

    team = ProcessGroup.join(device == "cpu")
    view = TrainingView(as_json, is_quiet=not team.is_first)
    # Of several processes none can stop alone: the page then only watches.
    log = RunLog(request.output, can_stop=team.size == 1) if team.is_first else nullcontext()
    with stopping() as is_stopped, log, closing(run.train(request, team)) as events:
        for event in events:
            view.show(event)
            if isinstance(log, RunLog):
                log.tell(event_json(event), is_step=hasattr(event, "learning_rate"))
            if is_stopped() or (isinstance(log, RunLog) and log.wants_stop()):
                events.close()
                if isinstance(log, RunLog):
                    log.stopped()
                view.say(f"stopped: {run.work_folder(request.output)} is kept, --resume goes on")
                return 130
    return None


@takes(request=load_options)
def calibrate(
    request: LoadRequest,
    data: OtherData = None,
    more: More = None,
    chats: Annotated[
        bool, Option("--chats", help="Your own chats of the page, asked again: a personal tree.")
    ] = False,
    nodes: Annotated[
        int, Option(metavar="N", min=2, max=256, help="Nodes of the tree, the root counted.")
    ] = 64,
    output: Annotated[
        Path | None, Option(metavar="FILE", help="Default: in the checkpoint's folder.")
    ] = None,
    as_json: AsJson = False,
) -> int | None:
    """Measure each head's predictions on prompts, and search the best tree for them."""
    if not data and not chats:
        raise UsageError("there is nothing to measure on: give --data FILE, or --chats")
    file = calibration_file(request.checkpoint, output)
    paths = data_paths([*(data or []), *(more or [])])
    talks = own_chats() if chats else []
    from medusa_chat.training.calibrate import calibrate as measure

    view = TrainingView(as_json)
    with stopping() as is_stopped, closing(measure(request, paths, nodes, file, talks)) as events:
        for event in events:
            view.show(event)
            if is_stopped():
                view.say("stopped: nothing was written")
                return 130
    return None


def calibration_file(checkpoint: str, output: Path | None) -> Path:
    """Where a calibration goes. Raises UsageError before anything is loaded."""
    if output is None:
        folder = Path(checkpoint).expanduser()
        if checkpoint == "demo" or not folder.is_dir():
            raise UsageError(f"{checkpoint} is no folder of yours: give --output FILE")
        return folder / "medusa_calibration.json"
    require_folder(output)
    return output


def own_chats() -> "list[Conversation]":
    """What the user said in the page. Raises UsageError where that is nothing."""
    from medusa_chat.paths import data_dir
    from medusa_chat.runtime.history import FILE, History
    from medusa_chat.training.conversations import Conversation

    found: list[Conversation] = []
    for number, kept in enumerate(History(data_dir() / FILE).all(), start=1):
        system = ({"role": "system", "content": kept.system},) if kept.system.strip() else ()
        chat = Conversation((*system, *kept.messages), f"chat {number}")
        if chat.asked:
            found.append(chat)
    if not found:
        raise UsageError("no chat is kept here yet: talk to a model in the page, or give --data")
    return found


def prepare(device: str, data_dir: Path | None, offline: bool) -> None:
    """Checks the device's name; sets what holds for the whole process. Raises UsageError."""
    place(device, data_dir)
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported


def data_paths(names: list[str]) -> tuple[Path, ...]:
    """Files that are here, or a Hub data set's. Raises UsageError, HubError."""
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            raise UsageError(f"{name} is a folder: give its files")
        if path.is_file():
            found.append(path)
            continue
        if name.startswith((".", "/", "~")) or name.count("/") < 1:
            raise UsageError(f"there is no file {name}")
        from medusa_chat.hub.dataset import dataset_files

        found += dataset_files(name)
    return tuple(found)


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is noted, a second one interrupts at once. Yields: was there one?"""
    stopped = threading.Event()

    def stop(*_: Any) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield stopped.is_set
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)
