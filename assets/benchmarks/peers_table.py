"""The README's table of speeds out of results of `medusa-chat bench --study peers --output FILE`.

    python assets/benchmarks/peers_table.py RESULT.json...

Prints Markdown: a line for each GGUF file, with what the README says of it, and above the table the
machine that measured it. Where several results have a file the last one counts.
"""

import json
import sys
from pathlib import Path
from typing import Any

Rows = dict[str, dict[str, Any]]
HEAD = (
    "file",
    "llama.cpp",
    "plain",
    "default, HumanEval",
    "default, MT-Bench",
    "of the memory's bandwidth",
    "memory (llama.cpp)",
    "first answer",
)


def main() -> None:
    results = [json.loads(Path(name).read_text("utf-8")) for name in sys.argv[1:]]
    if not results:
        sys.exit(__doc__)
    print("\n".join(table(results)))


def table(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the machine and of the table."""
    files: dict[str, Rows] = {}
    for result in results:
        for row in result["rows"]:
            file, _, what = row["name"].partition(": ")
            files.setdefault(file, {})[what] = row
    told = [f"{key}: {value}" for key, value in results[-1]["machine"].items()]
    cells = [HEAD, ("---",) * len(HEAD), *(line(file, rows) for file, rows in files.items())]
    return ["; ".join(told), "", *("| " + " | ".join(words) + " |" for words in cells)]


def line(file: str, rows: Rows) -> tuple[str, ...]:
    """The cells of a file."""
    llama, plain = rows["llama.cpp"]["value"], rows["plain"]["value"]
    return (
        file,
        figure(llama),
        f"{figure(plain)} ({times(plain, llama)})",
        *(answers(rows, where, llama) for where in ("HumanEval", "MT-Bench")),
        f"{100 * rows['share of the bandwidth']['value']:.0f} %",
        f"{size(rows['peak memory'])} ({size(rows['peak memory, llama.cpp'])})",
        f"{figure(rows['first answer']['value'])} s",
    )


def answers(rows: Rows, where: str, llama: float | None) -> str:
    """The default on one kind of prompts: tokens a second, beside llama.cpp and our plain."""
    found = rows.get(f"default on {where}", {"value": None})
    value = found["value"]
    if value is None:
        return "not measured"
    return f"{figure(value)} ({times(value, llama)}, {found['ratio']:.2f} x plain)"


def figure(value: float | None) -> str:
    """With two digits from ten on, else with one behind the point."""
    if value is None:
        return "not measured"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def times(value: float, llama: float | None) -> str:
    return f"{value / llama:.2f} x" if llama else "beside nothing"


def size(row: dict[str, Any]) -> str:
    return "not measured" if row["value"] is None else f"{row['value']:.2f} GB"


if __name__ == "__main__":
    main()
