"""`medusa-chat train`: parse, run, and tell how it goes.

Results go to stdout (with --json every event, a line each), progress to stderr.
"""

from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from medusa_chat.checkpoints.precision import PRECISIONS
from medusa_chat.cli.options import AsJson, DataDir, Device, Offline, prepare_process, values_of
from medusa_chat.cli.terminal import stopping
from medusa_chat.cli.training_data import More, data_paths
from medusa_chat.cli.training_progress import TrainingView, event_json
from medusa_chat.training.recipe import TrainRequest, read_recipe
from medusa_chat.training.run_log import RunLog


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, on what, and where it goes. recipe: the settings that the options of
    RecipeOptions change."""

    data: Annotated[
        list[str],
        Option(
            metavar="FILE|HUB_DATASET...",
            help="ShareGPT, UltraChat, messages, MT-Bench, AlpacaEval (JSON, JSONL, parquet), "
            "text.",
        ),
    ]
    output: Annotated[Path, Option(metavar="DIR", help="The new checkpoint; must not exist.")]
    more: More = None
    backbone: Annotated[str, Option(metavar="ID|DIR", help="The model that gets heads.")] = "demo"
    sequence_length: Annotated[
        int | None, Option(metavar="N", min=16, help="Longest row; longer ones are cut.")
    ] = None
    precision: Annotated[
        str, Option(metavar="|".join(PRECISIONS), help="The backbone's number format.")
    ] = "auto"
    device: Device = "auto"
    resume: Annotated[
        bool, Option("--resume", help="Go on where the same command was stopped.")
    ] = False
    offline: Offline = False
    data_dir: DataDir = None
    as_json: AsJson = False
    recipe: Annotated[
        str, Option(metavar="NAME|FILE", help="Settings; every option below changes one.")
    ] = "default"


@dataclass(frozen=True)
class RecipeOptions:
    """Options of a recipe, each named as its field; None leaves the recipe's value."""

    method: Annotated[
        str | None, Option(metavar="medusa-1|medusa-2", help="Heads alone, or the backbone too.")
    ] = None
    heads: Annotated[int | None, Option(metavar="N", help="Five are enough.")] = None
    head_layers: Annotated[int | None, Option(metavar="N", help="Residual layers.")] = None
    own_lm_head: Annotated[
        bool | None, Option("--own-lm-head/--shared-lm-head", help="An LM head for each head.")
    ] = None
    distill: Annotated[
        bool | None,
        Option("--distill/--no-distill", help="The backbone answers the prompts itself."),
    ] = None
    self_talk: Annotated[
        int | None, Option(metavar="N", help="With --distill: N more questions of its own.")
    ] = None
    soft_targets: Annotated[
        int | None, Option(metavar="K", help="Learn the backbone's K likeliest tokens, not one.")
    ] = None
    epochs: Annotated[int | None, Option(metavar="N", help="Times through the data.")] = None
    max_steps: Annotated[int | None, Option(metavar="N", help="Instead of --epochs.")] = None
    batch_tokens: Annotated[int | None, Option(metavar="N", help="Tokens of a batch.")] = None
    learning_rate: Annotated[float | None, Option(metavar="X", help="The backbone's.")] = None
    head_learning_rate_multiplier: Annotated[
        float | None, Option(metavar="X", help="The heads' rate is so many times that.")
    ] = None
    lambda0: Annotated[
        float | None, Option(metavar="X", help="Weight of the heads' loss in medusa-2.")
    ] = None
    lambda0_schedule: Annotated[
        str | None, Option(metavar="constant|sine", help="Whether it grows.")
    ] = None
    decay: Annotated[float | None, Option(metavar="X", help="Head k weighs decay^k.")] = None
    warmup_steps: Annotated[int | None, Option(metavar="N", help="Steps to full rate.")] = None
    lora_rank: Annotated[int | None, Option(metavar="N", help="Of the adapter.")] = None
    lora_alpha: Annotated[int | None, Option(metavar="N", help="Of the adapter.")] = None
    lora_dropout: Annotated[float | None, Option(metavar="X", help="Of the adapter.")] = None
    seed: Annotated[int | None, Option(metavar="N", help="Of shuffling and sampling.")] = None


@dataclass(frozen=True)
class Train(RecipeOptions, TrainOptions):
    """Make Medusa heads for a model. Ctrl-C stops; --resume goes on."""

    def run(self) -> int | None:
        """Check the options, then train; 130 where it was stopped."""
        recipe = read_recipe(self.recipe).changed(**values_of(RecipeOptions, self))
        prepare_process(self.device, self.data_dir, self.offline, self.precision)
        request = TrainRequest(
            *(self.backbone, data_paths(self.data, self.more), self.output.expanduser(), recipe),
            *(self.precision, self.device, self.offline, self.resume, self.sequence_length),
        )
        return run_training(request, self.as_json)


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
