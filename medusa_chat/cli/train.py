"""`medusa-chat train`: parse, run, and tell how it goes.

Results go to stdout (with --json every event, a line each), progress to stderr.
"""

from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from medusa_chat.checkpoints.precision import PRECISIONS
from medusa_chat.cli.options import (
    PLACE,
    AsJson,
    DataDir,
    Device,
    More,
    Offline,
    count,
    data_paths,
    flag,
    folder_path,
    prepare_process,
    value,
    values_of,
)
from medusa_chat.cli.terminal import stopping
from medusa_chat.cli.training_progress import TrainingView, event_json
from medusa_chat.errors import UsageError
from medusa_chat.training.events import HiddenStates, RunLog, TrainStep
from medusa_chat.training.recipe import TrainRequest, read_recipe

OF_MEDUSA_2 = ("lambda0", "lambda0_schedule", "lora_rank", "lora_alpha", "lora_dropout")


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, on what, and where it goes. recipe: the settings that the options of
    RecipeOptions change."""

    data: Annotated[
        list[str],
        value(
            "FILE|HUB_DATASET...",
            "Training data: ShareGPT, UltraChat, messages, MT-Bench, AlpacaEval (JSON, JSONL, "
            "parquet) or "
            "text.",
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
    """Options of a recipe, each named as its field; None leaves the recipe's value."""

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
        """Check the options, then train; 130 where it was stopped."""
        recipe = read_recipe(self.recipe).changed(**values_of(RecipeOptions, self))
        unread = [name for name in OF_MEDUSA_2 if getattr(self, name) is not None]
        if unread and recipe.method != "medusa-2":
            option = unread[0].replace("_", "-")
            raise UsageError(f"--{option} is for medusa-2: add --method medusa-2, or omit it")
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
                log.tell(event_json(event), is_step=isinstance(event, (TrainStep, HiddenStates)))
            if is_stopped() or (isinstance(log, RunLog) and log.wants_stop()):
                events.close()
                if isinstance(log, RunLog):
                    log.stopped()
                kept = run.work_folder(request.output)
                view.say(f"stopped: {kept} is kept: continue with --resume")
                return 130
    return None
