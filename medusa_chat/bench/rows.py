"""Row: one figure of a result, measured or not; and the table of all rows."""

from collections.abc import Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]


def row(
    name: str,
    values: Sequence[float],
    unit: str,
    against: str | None = None,
    baseline: Sequence[float] | None = None,
    note: str = "",
    value: float | None = None,
    command: str = "",
) -> Row:
    """One row. values: one for each round, or for each answer. baseline: the values of `against`,
    whose ratios round by round have `ratio` as their median. note: what a reader must know. value:
    where it is not the median. command: the one that measures it, if not `--study NAME`."""
    ratio = median(a / b for a, b in zip(values, baseline, strict=True)) if baseline else None
    return {
        "name": name,
        "value": median(values) if value is None else value,
        "unit": unit,
        "min": min(values),
        "max": max(values),
        "against": against,
        "ratio": ratio,
        "command": command,
        "note": note,
    }


def unmeasured(name: str, unit: str, why: str) -> Row:
    """A row for what could not be measured, with the reason; it is shown too."""
    empty: dict[str, Any] = dict.fromkeys(("value", "min", "max", "against", "ratio"))
    return {"name": name, "unit": unit, **empty, "command": "", "note": f"not measured: {why}"}


def table(result: dict[str, Any]) -> str:
    """The rows as a text table, below the machine and above the verdict. The value is the median of
    the rounds, or what all answers give together (tokens a step; the study "peers")."""
    lines = [f"{key}: {value}" for key, value in result["machine"].items()]
    width = max([22, *(len(row["name"]) + 2 for row in result["rows"])])
    head = f"{'':{width}}{'value':>10}{'min':>10}{'max':>10}  {'unit':14}{'ratio':>7}  against"
    lines += ["", head, *(_line(row, width) for row in result["rows"])]
    if verdict := result.get("verdict"):
        lines += ["", verdict]
    return "\n".join(lines)


def _line(row: Row, width: int) -> str:
    if row["value"] is None:
        return f"{row['name']:{width}}{row['note']}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    figures = "".join(f"{row[key]:>10.2f}" for key in ("value", "min", "max"))
    end = f"{ratio:>7}  {row['against'] or ''}".rstrip()
    note = f"  ({row['note']})" if row.get("note") else ""
    return f"{row['name']:{width}}{figures}  {row['unit']:14}{end}{note}".rstrip()
