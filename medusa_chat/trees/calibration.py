"""Calibration: measured rank accuracies of heads, and the tree searched from them, on disk."""

import json
from dataclasses import dataclass
from pathlib import Path

from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ModelError, UsageError

CALIBRATION_FILE = "medusa_calibration.json"
# what reading something else raises
MISSHAPEN = (ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError)


def _tokens(listed: object) -> tuple[int, ...]:
    """Token ids, each once. Raises ValueError for anything else."""
    if not isinstance(listed, list) or any(type(token) is not int for token in listed):
        raise ValueError("its shortlist is not a list of token ids")
    return tuple(sorted(set(listed)))


@dataclass(frozen=True)
class Calibration:
    """Measured rank accuracies a[k][i] (head k's (i+1)-th prediction is right) and the tree
    searched from them, in order of value.

    measured_on, positions: of how many places of what, as far as it is said. rates: (nodes, tokens
    a step) that the tree gave there. shortlist: the tokens that drafts are taken from, where not
    from all.
    """

    accuracies: tuple[tuple[float, ...], ...]
    tree: Tree
    measured_on: str = ""
    positions: int = 0
    rates: tuple[tuple[int, float], ...] = ()
    shortlist: tuple[int, ...] = ()

    def shortlist_of(self, vocabulary: int) -> tuple[tuple[int, ...], list[str]]:
        """The shortlist for a backbone of so many tokens; empty where it is of no use there, and a
        sentence that says why."""
        if not all(0 <= token < vocabulary for token in self.shortlist):
            why = "it has tokens outside the vocabulary"
        elif 2 * len(self.shortlist) > vocabulary:
            why = "it covers over half of the vocabulary"
        else:
            return self.shortlist, []
        return (), [f"the calibration's shortlist is ignored: {why}"]

    @classmethod
    def read(cls, file: Path) -> "Calibration":
        """Raises ModelError when the file is not a calibration."""
        try:
            text = file.read_bytes()
        except OSError as error:
            raise _invalid(file, error) from error
        return cls.parse(text, file)

    @classmethod
    def parse(cls, text: bytes, file: Path | str) -> "Calibration":
        """text: what `file` holds. Raises ModelError when that is not a calibration."""
        try:
            values = json.loads(text)
            table = tuple(tuple(map(float, row)) for row in values["accuracies"])
            rates = sorted((int(n), float(r)) for n, r in values.get("tokens_per_step", {}).items())
            return cls(
                table,
                Tree.from_choices(values["choices"]),
                measured_on=str(values.get("measured_on", "")),
                positions=int(values.get("positions", 0)),
                rates=tuple(rates),
                shortlist=_tokens(values.get("shortlist", [])),
            )
        except (*MISSHAPEN, UsageError) as error:
            raise _invalid(file, error) from error


def _invalid(file: Path | str, why: Exception) -> ModelError:
    return ModelError(
        f"{file} is not a valid calibration ({why}): delete it, or run medusa-chat calibrate"
    )
