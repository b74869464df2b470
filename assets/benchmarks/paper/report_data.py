"""Report: the answers of the study "report", and the paper's figures of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum

from medusa_chat.bench.answers import Run, mean_step, rate
from medusa_chat.decoding.settings import GenerationSettings


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
