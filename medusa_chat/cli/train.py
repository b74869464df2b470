"""`medusa-chat train` and `medusa-chat calibrate`: parse, run, and tell how it goes.

Results go to stdout (with --json every event, a line each), progress to stderr.
"""

from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from medusa_chat import paths
from medusa_chat.checkpoints.precision import PRECISIONS
from medusa_chat.cli.options import (
    AsJson,
    Backbone,
    Checkpoint,
    DataDir,
    Device,
    MaxContext,
    Offline,
    Precision,
    load_request,
    prepare_process,
)
from medusa_chat.cli.terminal import require_folder, stopping
from medusa_chat.cli.training_progress import TrainingView, event_json
from medusa_chat.errors import UsageError
from medusa_chat.training.recipe import TrainRequest, read_recipe
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
NewCheckpoint = Annotated[Path, Option(metavar="DIR", help="The new checkpoint; must not exist.")]
TrainedBackbone = Annotated[str, Option(metavar="ID|DIR", help="The model that gets heads.")]
SequenceLength = Annotated[
    int | None, Option(metavar="N", min=16, help="Longest row; longer ones are cut.")
]
TrainPrecision = Annotated[
    str, Option(metavar="|".join(PRECISIONS), help="The backbone's number format.")
]
Resume = Annotated[bool, Option("--resume", help="Go on where the same command was stopped.")]
Chats = Annotated[
    bool, Option("--chats", help="Your own chats of the page, asked again: a personal tree.")
]
CalibratedNodes = Annotated[
    int, Option(metavar="N", min=2, max=256, help="Nodes of the tree, the root counted.")
]
CalibrationOutput = Annotated[
    Path | None, Option(metavar="FILE", help="Default: in the checkpoint's folder.")
]


# Options of a recipe, each named as its field; None leaves the recipe's value.
RecipeName = Annotated[
    str, Option(metavar="NAME|FILE", help="Settings; every option below changes one.")
]
Method = Annotated[
    str | None, Option(metavar="medusa-1|medusa-2", help="Heads alone, or the backbone too.")
]
Heads = Annotated[int | None, Option(metavar="N", help="Five are enough.")]
HeadLayers = Annotated[int | None, Option(metavar="N", help="Residual layers.")]
OwnLmHead = Annotated[
    bool | None, Option("--own-lm-head/--shared-lm-head", help="An LM head for each head.")
]
Distill = Annotated[
    bool | None, Option("--distill/--no-distill", help="The backbone answers the prompts itself.")
]
SelfTalk = Annotated[
    int | None, Option(metavar="N", help="With --distill: N more questions of its own.")
]
SoftTargets = Annotated[
    int | None, Option(metavar="K", help="Learn the backbone's K likeliest tokens, not one.")
]
Epochs = Annotated[int | None, Option(metavar="N", help="Times through the data.")]
MaxSteps = Annotated[int | None, Option(metavar="N", help="Instead of --epochs.")]
BatchTokens = Annotated[int | None, Option(metavar="N", help="Tokens of a batch.")]
LearningRate = Annotated[float | None, Option(metavar="X", help="The backbone's.")]
HeadLearningRateMultiplier = Annotated[
    float | None, Option(metavar="X", help="The heads' rate is so many times that.")
]
Lambda0 = Annotated[
    float | None, Option(metavar="X", help="Weight of the heads' loss in medusa-2.")
]
Lambda0Schedule = Annotated[str | None, Option(metavar="constant|sine", help="Whether it grows.")]
Decay = Annotated[float | None, Option(metavar="X", help="Head k weighs decay^k.")]
WarmupSteps = Annotated[int | None, Option(metavar="N", help="Steps to full rate.")]
LoraRank = Annotated[int | None, Option(metavar="N", help="Of the adapter.")]
LoraAlpha = Annotated[int | None, Option(metavar="N", help="Of the adapter.")]
LoraDropout = Annotated[float | None, Option(metavar="X", help="Of the adapter.")]
Seed = Annotated[int | None, Option(metavar="N", help="Of shuffling and sampling.")]

RECIPE_OPTIONS = (
    *("method", "heads", "head_layers", "own_lm_head", "distill", "self_talk", "soft_targets"),
    *("epochs", "max_steps", "batch_tokens", "learning_rate", "head_learning_rate_multiplier"),
    *("lambda0", "lambda0_schedule", "decay", "warmup_steps"),
    *("lora_rank", "lora_alpha", "lora_dropout", "seed"),
)


def train(
    data: Data,
    output: NewCheckpoint,
    more: More = None,
    backbone: TrainedBackbone = "demo",
    sequence_length: SequenceLength = None,
    precision: TrainPrecision = "auto",
    device: Device = "auto",
    resume: Resume = False,
    offline: Offline = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    recipe: RecipeName = "default",
    method: Method = None,
    heads: Heads = None,
    head_layers: HeadLayers = None,
    own_lm_head: OwnLmHead = None,
    distill: Distill = None,
    self_talk: SelfTalk = None,
    soft_targets: SoftTargets = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    batch_tokens: BatchTokens = None,
    learning_rate: LearningRate = None,
    head_learning_rate_multiplier: HeadLearningRateMultiplier = None,
    lambda0: Lambda0 = None,
    lambda0_schedule: Lambda0Schedule = None,
    decay: Decay = None,
    warmup_steps: WarmupSteps = None,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
    lora_dropout: LoraDropout = None,
    seed: Seed = None,
) -> int | None:
    """Make Medusa heads for a model. Ctrl-C stops; --resume goes on."""
    chosen = read_recipe(recipe).changed(**recipe_changes(locals()))
    prepare_process(device, data_dir, offline, precision)
    files = data_paths([*data, *(more or [])])
    options = (chosen, precision, device, offline, resume, sequence_length)
    return run_training(TrainRequest(backbone, files, output.expanduser(), *options), as_json)


def recipe_changes(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the command's options that are fields of a recipe."""
    return {name: options[name] for name in RECIPE_OPTIONS}


def run_training(request: TrainRequest, as_json: bool) -> int | None:
    """Train, and show every event; 130 where it was stopped."""
    from medusa_chat.training import run
    from medusa_chat.training.process_group import ProcessGroup

    group = ProcessGroup.join(request.device == "cpu")
    view = TrainingView(as_json, is_quiet=not group.is_first)
    # Of several processes none can stop alone: the page then only watches.
    log = RunLog(request.output, can_stop=group.size == 1) if group.is_first else nullcontext()
    with stopping() as is_stopped, log, closing(run.train(request, group)) as events:
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


def calibrate(
    data: OtherData = None,
    more: More = None,
    chats: Chats = False,
    nodes: CalibratedNodes = 64,
    output: CalibrationOutput = None,
    as_json: AsJson = False,
    checkpoint: Checkpoint = "demo",
    backbone: Backbone = None,
    precision: Precision = "auto",
    device: Device = "auto",
    max_context: MaxContext = None,
    offline: Offline = False,
    data_dir: DataDir = None,
) -> int | None:
    """Measure each head's predictions on prompts, and search the best tree for them."""
    request = load_request(checkpoint, backbone, precision, device, max_context, offline, data_dir)
    if not data and not chats:
        raise UsageError("there is nothing to measure on: give --data FILE, or --chats")
    file = calibration_file(checkpoint, output)
    files = data_paths([*(data or []), *(more or [])])
    talks = own_chats() if chats else []
    from medusa_chat.training.calibrate import calibrate as measure

    view = TrainingView(as_json)
    with stopping() as is_stopped, closing(measure(request, files, nodes, file, talks)) as events:
        for event in events:
            view.show(event)
            if is_stopped():
                view.say("stopped: nothing was written")
                return 130
    return None


def calibration_file(checkpoint: str, output: Path | None) -> Path:
    """The file of a calibration. Raises UsageError before anything is loaded."""
    if output is None:
        folder = Path(checkpoint).expanduser()
        if checkpoint == "demo" or not folder.is_dir():
            raise UsageError(f"{checkpoint} is not a local folder: give --output FILE")
        return folder / "medusa_calibration.json"
    require_folder(output)
    return output


def own_chats() -> "list[Conversation]":
    """The chats saved by the page. Raises UsageError where there are none."""
    from medusa_chat.runtime.history import FILE, History
    from medusa_chat.training.conversations import Conversation

    found: list[Conversation] = []
    for number, kept in enumerate(History(paths.data_dir() / FILE).all(), start=1):
        system = ({"role": "system", "content": kept.system},) if kept.system.strip() else ()
        chat = Conversation((*system, *kept.messages), f"chat {number}")
        if chat.asked:
            found.append(chat)
    if not found:
        raise UsageError("no chats are saved yet: chat with a model in the page, or give --data")
    return found


def data_paths(names: list[str]) -> tuple[Path, ...]:
    """Local files, and the files of Hub data sets. Raises UsageError, HubError."""
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            raise UsageError(f"{name} is a folder: give its files")
        if path.is_file():
            found.append(path)
            continue
        if name.startswith((".", "/", "~")) or name.count("/") < 1:
            raise UsageError(f"there is no file {name}: give a file, or a Hub data set OWNER/NAME")
        from medusa_chat.hub.dataset import dataset_files

        found += dataset_files(name)
    return tuple(found)
