"""Question, Run and Report: timed answers, and the paper's figures of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum

from medusa_chat.decoding.settings import GenerationSettings


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, and its category, "" where the file names none."""

    ids: list[int]
    category: str


@dataclass(frozen=True)
class Run:
    """One timed answer. tokens: ids. steps: passes of the backbone after the prefill. stepped:
    tokens that the steps gave, an end token included. seconds: of the steps."""

    question: Question
    tokens: tuple[int, ...]
    steps: int
    stepped: float
    seconds: float

    @property
    def is_timed(self) -> bool:
        """Whether there was a step: an answer may end with the prefill's token."""
        return self.steps > 0 and self.seconds > 0

    @property
    def per_step(self) -> float:
        """Tokens a step, the acceleration rate of this answer."""
        return self.stepped / self.steps

    @property
    def rate(self) -> float:
        """Tokens a second of decoding."""
        return self.stepped / self.seconds


@dataclass(frozen=True)
class Turn:
    """A question and Medusa's answer, None where the context had no space for one. runs: by name,
    those with a step."""

    question: str
    answer: str | None
    runs: dict[str, Run]


@dataclass(frozen=True)
class Answered:
    """The turns of one row of the file."""

    number: int | str
    category: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Figures:
    """Medusa against one baseline over some answers; every sum is over all of them."""

    ours: Sequence[Run]
    base: Sequence[Run]

    @property
    def acceleration(self) -> float:
        """Tokens a step."""
        return fsum(run.stepped for run in self.ours) / sum(run.steps for run in self.ours)

    @property
    def overhead(self) -> float:
        """Time of a step over the baseline's time of a token."""
        return mean_step(self.ours) * rate(self.base)

    @property
    def speedup(self) -> float:
        """Tokens a second over the baseline's."""
        return rate(self.ours) / rate(self.base)


@dataclass
class Report:
    """What the page and a judge need beside the rows; the study "report" fills it. source: the name
    of the file of questions."""

    source: str = ""
    settings: GenerationSettings = field(default_factory=GenerationSettings)
    answered: list[Answered] = field(default_factory=list)


def mean_step(runs: Sequence[Run]) -> float:
    """Seconds of a step of all answers together."""
    return fsum(run.seconds for run in runs) / sum(run.steps for run in runs)


def rate(runs: Sequence[Run]) -> float:
    """Tokens a second of all answers together."""
    return fsum(run.stepped for run in runs) / fsum(run.seconds for run in runs)
