"""What the study "report" keeps of each answer, and the paper's figures of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum

from medusa_chat.decoding.settings import GenerationSettings


@dataclass(frozen=True)
class Question:
    """A prompt as ids, and its kind where the file says so."""

    ids: list[int]
    category: str


@dataclass(frozen=True)
class Run:
    """One answer. seconds: of its steps, prefill left out."""

    question: Question
    tokens: tuple[int, ...]
    steps: int
    stepped: float
    seconds: float

    @property
    def is_timed(self) -> bool:
        """Whether there was a step: an answer may end with the token of the prefill."""
        return self.steps > 0 and self.seconds > 0

    @property
    def per_step(self) -> float:
        """Tokens a step: the acceleration rate of this answer."""
        return self.stepped / self.steps

    @property
    def rate(self) -> float:
        """Tokens a second of decoding."""
        return self.stepped / self.seconds


@dataclass(frozen=True)
class Turn:
    """A question and the answer with Medusa; None where the context had no room for one.
    plays: by way of decoding, of those that had a step."""

    asked: str
    said: str | None
    runs: dict[str, Run]


@dataclass(frozen=True)
class Answered:
    """The turns of one row of the file."""

    number: int | str
    category: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Figures:
    """What Medusa did to some answers beside one baseline; every sum is over all of them."""

    ours: list[Run]
    base: list[Run]

    @property
    def acceleration(self) -> float:
        """Tokens a step."""
        return fsum(p.stepped for p in self.ours) / sum(p.steps for p in self.ours)

    @property
    def overhead(self) -> float:
        """Time of a step over time of one of the baseline's tokens."""
        return _mean_step(self.ours) / (
            fsum(p.seconds for p in self.base) / fsum(p.stepped for p in self.base)
        )

    @property
    def speedup(self) -> float:
        """Tokens a second over the baseline's."""
        return _rate(self.ours) / _rate(self.base)


@dataclass
class Report:
    """Filled by the study: what a page and a judge need beside the rows."""

    source: str = ""
    settings: GenerationSettings = field(default_factory=GenerationSettings)
    answered: list[Answered] = field(default_factory=list)


def _mean_step(runs: Sequence[Run]) -> float:
    return fsum(p.seconds for p in runs) / sum(p.steps for p in runs)


def _rate(runs: Sequence[Run]) -> float:
    return fsum(p.stepped for p in runs) / fsum(p.seconds for p in runs)
