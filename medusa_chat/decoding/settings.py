"""GenerationSettings: how one answer is to be decoded. Frozen, validated, without torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

from medusa_chat.decoding.drafters import kinds
from medusa_chat.errors import UsageError
from medusa_chat.ranges import require_ranges, within

ACCEPTANCE_NAMES = ("exact", "typical", "typical-sampled")
GREEDY = 1e-3  # a temperature below it decodes greedily
MAX_NODES = 256
# what a model may name defaults of, in its generation config
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
CHUNK = 512  # tokens of a prompt that one pass reads
CPU_CHUNK = 256  # on a CPU, whose cache then holds most of the pass's activations


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of one answer; names and defaults are the command line's.

    drafter: None means auto: heads and text in one tree, or prompt-lookup without heads.
    posterior_threshold, posterior_alpha: epsilon and delta of typical acceptance
    (Medusa, arXiv 2401.10774, section 2.3.1).
    tree: "auto", the name of a preset, or the path of a JSON file. nodes: counts the root; None
    keeps the whole tree. seed: None draws a new one, which the first event records.
    Raises UsageError on a value outside its range.
    """

    drafter: str | None = None
    acceptance: str = "exact"
    temperature: float = within(0.0, 2.0, 0.0)
    top_p: float = within(0.0, 1.0, 1.0)
    top_k: int = within(0, 1_000_000, 0)
    min_p: float = within(0.0, 1.0, 0.0)
    repetition_penalty: float = within(0.1, 10.0, 1.0)
    presence_penalty: float = within(-2.0, 2.0, 0.0)
    frequency_penalty: float = within(-2.0, 2.0, 0.0)
    posterior_threshold: float = within(0.0, 1.0, 0.09)
    posterior_alpha: float = within(0.0, 1.0, 0.3, is_open=True)
    tree: str = "auto"
    nodes: int | None = within(1, MAX_NODES, None)
    max_new_tokens: int = within(1, 1_000_000, 512)
    seed: int | None = within(0, 2**63 - 1, None)
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_choice("drafter", self.drafter, (None, *kinds.NAMES))
        _require_choice("acceptance", self.acceptance, ACCEPTANCE_NAMES)
        require_ranges(self)
        if not isinstance(self.tree, str) or not self.tree:
            raise UsageError(f"tree is {self.tree!r}: give auto, a preset's name or a JSON file")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError(f"stop is {self.stop!r}: give texts that are not empty")

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the temperature makes every acceptance plain greedy decoding."""
        return self.temperature < GREEDY

    @cached_property
    def has_penalties(self) -> bool:
        """Whether tokens that the text already has get other logits."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0)

    @cached_property
    def scale(self) -> float:
        """The divisor of logits: the temperature, or 1 for greedy decoding."""
        return 1.0 if self.is_greedy else self.temperature

    def to_json(self) -> dict[str, Any]:
        """Plain values, as the first event of a trace records them."""
        return asdict(self) | {"stop": list(self.stop)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Settings from recorded or posted values; unknown names are refused."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise UsageError(f"unknown setting {sorted(unknown)[0]!r}: remove it")
        stop = values.get("stop") or ()
        if not isinstance(stop, (list, tuple)):
            raise UsageError(f"stop is {stop!r}: give a list of texts")
        return cls(**{**values, "stop": tuple(stop)})


def with_defaults(settings: GenerationSettings, defaults: Mapping[str, Any]) -> GenerationSettings:
    """The settings with these values for sampling, and what changes nothing where there is none;
    penalties of the answer's tokens, of which no model names a default, are off."""
    plain = GenerationSettings()
    names = (*SAMPLING, "presence_penalty", "frequency_penalty")
    return replace(settings, **{name: defaults.get(name, getattr(plain, name)) for name in names})


def sampling_words(sampling: Mapping[str, float]) -> str:
    """Defaults as a line: "temperature 0.7, top-p 0.8"."""
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in sampling.items())


def _require_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        names = ", ".join(str(choice) for choice in allowed if choice)
        raise UsageError(f"{name} is {value!r}: choose one of {names}")
