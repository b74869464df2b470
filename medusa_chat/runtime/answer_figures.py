"""AnswerFigures: which model gave an answer, and how fast."""

from typing import Any, NamedTuple, Self


class AnswerFigures(NamedTuple):
    """model: its name as guests see it. rate: tokens per second; per_step: tokens per step; None
    without steps. is_plain: whether it was plain decoding. ratio: its speed against plain decoding
    timed beside it; None where none was. first_seconds: from asking to the first token; None where
    it is not known."""

    model: str
    rate: float | None = None
    per_step: float | None = None
    is_plain: bool = False
    ratio: float | None = None
    first_seconds: float | None = None

    @classmethod
    def from_json(cls, values: Any) -> Self | None:
        """Read what was written, strictly; None for None. Raises ValueError or TypeError."""
        if values is None:
            return None
        made = cls(*values)
        rates = (made.rate, made.per_step, made.ratio, made.first_seconds)
        if not isinstance(made.model, str) or type(made.is_plain) is not bool:
            raise ValueError("it contains something that is not a model's name")
        if not all(rate is None or type(rate) in (int, float) for rate in rates):
            raise ValueError("it contains an invalid rate")
        return made

    def after(self, before: Self | None) -> Self | None:
        """The figures of an answer that continued another: the models of both, and no rate, since
        none covers the whole answer. None where the earlier model is not known."""
        if before is None:
            return None
        models = ", ".join(dict.fromkeys((*before.model.split(", "), self.model)))
        return type(self)(models, first_seconds=self.first_seconds)

    @property
    def speed(self) -> str:
        """The figures in words; empty where nothing was measured."""
        if not self.rate or not self.per_step:
            return ""
        how = "plain" if self.is_plain else f"{self.per_step:.1f} tokens a step"
        return f"{self.rate:,.{0 if self.rate >= 100 else 1}f} tokens/s · {how}"

    @property
    def line(self) -> str:
        """Model and figures, shown below the answer."""
        return " · ".join(filter(None, (self.model, self.speed)))
