"""Recipe: the settings of a training, from presets/recipes/*.toml and the command line.

No torch: a wrong value is refused before slow imports.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.errors import UsageError
from medusa_chat.ranges import require_ranges, within

METHODS = ("medusa-1", "medusa-2")
SCHEDULES = ("constant", "sine")
MAX_HEADS = 10
CHOICES = {
    "method": METHODS,
    "lambda0_schedule": SCHEDULES,
    "optimizer": ("muon", "adamw"),
    "stages": (1, 2),
    "output": ("merged", "adapter"),
}
BACKBONE_RATE = 5e-4  # of LoRA in Medusa-2 (Medusa, arXiv 2401.10774, B.3)


@dataclass(frozen=True)
class Recipe:
    """Settings of `medusa-chat train`; options of the command line bear the same names.

    optimizer: "muon" uses Muon for the matrices of the heads' layers and AdamW at a tenth of its
    rate for biases and LM heads of their own. learning_rate: the backbone's (medusa-2); the heads'
    is head_learning_rate_multiplier times as high. max_steps: in place of epochs. batch_tokens:
    padding included. cache: keep the hidden states in memory where they fit and there is a second
    epoch (medusa-1, one process). decay: the loss of head k (from 1) has the weight decay^k.
    stages: 2 trains the heads alone first (medusa-2). root: the heads also read the token that is
    certain when they draft, which other programs' heads do not. lambda0: weight of the heads' loss
    beside the backbone's; with "sine" it grows from 0. distill: the backbone answers the prompts
    itself, at `temperature` and with at most `answer_tokens` tokens; in Medusa-2 it is also its own
    teacher: its loss is then KL(without the adapter || with it) in place of the data's
    cross-entropy (Medusa, arXiv 2401.10774, 2.3.2). self_talk: number of questions that it adds to
    a conversation after the last one. output: of Medusa-2, a whole model or an adapter with heads.
    Raises UsageError for a value out of range.
    """

    name: str = "default"
    title: str = ""
    method: str = "medusa-1"
    heads: int = within(1, MAX_HEADS, 5)
    head_layers: int = within(1, 8, 1)
    own_lm_head: bool = False
    root: bool = False
    distill: bool = False
    temperature: float = within(0.0, 2.0, 0.3)
    answer_tokens: int = within(4, 100_000, 512)
    self_talk: int = within(0, 16, 0)
    optimizer: str = "muon"
    epochs: int = within(1, 1000, 2)
    max_steps: int | None = within(1, 10_000_000, None)
    batch_tokens: int = within(16, 10_000_000, 8192)
    sequence_length: int = within(16, 1_000_000, 2048)
    cache: bool = True
    learning_rate: float = within(1e-8, 1.0, 5e-3)
    head_learning_rate_multiplier: float = within(1e-3, 1000.0, 4.0)
    stages: int = 1
    lambda0: float = within(0.0, 100.0, 0.2)
    lambda0_schedule: str = "constant"
    decay: float = within(0.01, 1.0, 0.8)
    warmup_steps: int = within(0, 1_000_000, 20)
    weight_decay: float = 0.0
    lora_rank: int = within(1, 4096, 32)
    lora_alpha: int = within(1, 65_536, 16)
    lora_dropout: float = within(0.0, 0.9, 0.05)
    output: str = "merged"
    seed: int = within(0, 2**62, 0)

    def __post_init__(self) -> None:
        require_ranges(self, _option)
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                choice = " or ".join(map(str, allowed))
                raise UsageError(f"{_option(name)} is {getattr(self, name)!r}: choose {choice}")
        if self.self_talk and not self.distill:
            raise UsageError("self-talk needs distill: add --distill, or omit --self-talk")

    @property
    def head_learning_rate(self) -> float:
        """The heads' learning rate."""
        return self.learning_rate * self.head_learning_rate_multiplier

    @property
    def batch_labels(self) -> int:
        """Positions of a batch that is drawn from kept hidden states: about as many as a batch of
        whole examples has."""
        return max(self.batch_tokens // 4, 1)

    @property
    def steps(self) -> int:
        """Optimizer steps of a stage, of a resolved recipe (see setup.resolved)."""
        assert self.max_steps is not None
        return self.max_steps

    @property
    def evaluate_every(self) -> int:
        """Steps between two evaluations; one also follows the last step."""
        return max(self.steps // 10, 1)

    @property
    def save_every(self) -> int:
        """Steps between two states on the disk; the last step's is kept, too."""
        return min(self.evaluate_every, 100)

    def changed(self, **options: Any) -> "Recipe":
        """The recipe with the options that are not None. Raises UsageError."""
        given = {name: value for name, value in options.items() if value is not None}
        return replace(self, **self._for_method(given))

    def _for_method(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values with what Medusa-2 needs where the recipe is one of Medusa-1 and they do not
        say otherwise: a rate that harms no backbone, the same for the heads, and two stages."""
        if values.get("method") != "medusa-2" or self.method == "medusa-2":
            return values
        own = {"learning_rate": BACKBONE_RATE, "stages": 2}
        if "learning_rate" not in values and "head_learning_rate_multiplier" not in values:
            own["head_learning_rate_multiplier"] = self.head_learning_rate / BACKBONE_RATE
        return own | values


@dataclass(frozen=True)
class TrainRequest:
    """A request for `medusa-chat train`. backbone: ID or DIR; data: local files.

    sequence_length: of the command line, which is refused where it exceeds the context; the
    recipe's is reduced instead.
    """

    backbone: str
    data: tuple[Path, ...]
    output: Path
    recipe: Recipe
    precision: str = "auto"
    device: str = "auto"
    offline: bool = False
    resume: bool = False
    sequence_length: int | None = None


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that ship with the program."""
    return tuple(sorted(file.stem for file in paths.preset("recipes").glob("*.toml")))


def read_recipe(name: str) -> Recipe:
    """A recipe by its name, or from a TOML file. Raises UsageError."""
    file = paths.preset("recipes", f"{name}.toml")
    if name not in recipe_names():
        file = Path(name)
        if not name.endswith(".toml") or not file.is_file():
            names = ", ".join(recipe_names())
            raise UsageError(
                f"there is no recipe {name[:80]!r}: give a TOML file, or one of {names}"
            )
    try:
        return _recipe(tomllib.loads(file.read_text("utf-8")), file.stem)
    except (OSError, ValueError, UsageError) as error:
        raise UsageError(f"recipe {file}: {error}") from error


def _recipe(values: Mapping[str, Any], name: str) -> Recipe:
    kinds = {field.name: type(field.default) for field in fields(Recipe)} | {"max_steps": int}
    for key, value in values.items():
        if key not in kinds:
            raise UsageError(f"unknown setting {key!r}: remove it")
        is_whole = kinds[key] is float and type(value) is int
        if type(value) is not kinds[key] and not is_whole:
            raise UsageError(f"{key} must be {kinds[key].__name__}, not {str(value)[:40]!r}")
    return Recipe(name=name).changed(**values)


def _option(name: str) -> str:
    return name.replace("_", "-")
