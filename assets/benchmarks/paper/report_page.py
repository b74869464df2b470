"""report_html(): a report as one HTML file without scripts or external files, light and dark.

Every text of a file or a model is escaped, and the page's policy forbids scripts as well.
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from report import GENERATE, PLAIN, by_category, figures
from report_data import Answered, Figures, Report, Turn

STYLE = Path(__file__).with_name("report.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
WORDS = """<h2>What the words mean</h2>
<p>Acceleration rate: tokens a step. Overhead: time of such a step over the time of a token of the
baseline. Speedup: the first divided by the second, which is tokens a second over the baseline's.
The reading of the prompt is left out of all of them. The paper's Table 1 has 3.47, 1.22 and 2.83
for Vicuna-7B on MT-Bench, with transformers of its day as the baseline.</p>"""


def report_html(result: dict[str, Any], found: Report) -> str:
    """The whole file. result: from `run`; found: the report that it filled."""
    machine = {name: str(value) for name, value in result["machine"].items() if name != "prompts"}
    title = f"Medusa on {found.source}: {machine.get('model', '')}"
    settings = found.settings
    how = f"{settings.acceptance} acceptance at temperature {settings.temperature:g}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE.read_text('utf-8')}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_count(found.answered))}, {escape(how)}.</p>',
        *_table(found.answered, machine.get("model", "").rpartition(", ")[2]),
        WORDS,
        "<h2>Measured on</h2><dl>",
        *(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in machine.items()),
        "</dl><h2>Questions and answers</h2>",
        *(_details(one) for one in found.answered),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _count(answered: Sequence[Answered]) -> str:
    turns = [turn for one in answered for turn in one.turns]
    left_out = sum(turn.answer is None for turn in turns)
    words = f"{len(answered)} questions, {len(turns) - left_out} answers"
    return words + (f", {left_out} turns had no room in the context" if left_out else "")


def _table(answered: Sequence[Answered], precision: str) -> Iterator[str]:
    kinds = by_category(answered)
    pairs = {k: (figures(v, PLAIN), figures(v, GENERATE)) for k, v in kinds.items()}
    most = max((f.speedup for f, _ in pairs.values() if f), default=1.0)
    base = escape(precision)
    yield '<div class="wide"><table><thead><tr>'
    heads = (
        "questions",
        "answers",
        "acceleration rate",
        f"overhead against {PLAIN}, {base}",
        f"speedup against {PLAIN}, {base}",
        f"speedup against {GENERATE}, {base}",
        "",
    )
    yield "".join(f'<th scope="col">{head}</th>' for head in heads) + "</tr></thead><tbody>"
    for kind, (plain, generate) in pairs.items():
        yield _line(kind, kinds[kind], plain, generate, most)
    yield "</tbody></table></div>"


def _line(
    kind: str,
    rows: Sequence[Answered],
    plain: Figures | None,
    generate: Figures | None,
    most: float,
) -> str:
    shown = f"{kind} ({len(rows)})"
    cells = [escape(shown), str(len(plain.ours) if plain else 0)]
    cells += [f"{plain.acceleration:.2f}", f"{plain.overhead:.2f}"] if plain else ["-", "-"]
    cells += [f"{found.speedup:.2f}" if found else "not measured" for found in (plain, generate)]
    width = 100 * plain.speedup / most if plain else 0
    drawn = f'<td class="drawn"><span class="bar" style="width:{width:.0f}%"></span></td>'
    of = ' class="all"' if kind == "all" else ""
    return f"<tr{of}>" + "".join(f"<td>{cell}</td>" for cell in cells) + drawn + "</tr>"


def _details(one: Answered) -> str:
    name = f"{one.number} · {one.category}" if one.category else str(one.number)
    first = one.turns[0].question if one.turns else ""
    head = f'<span class="soft">{escape(name)}</span> {escape(first[:120])}'
    return f"<details><summary>{head}</summary>{''.join(map(_turn, one.turns))}</details>"


def _turn(turn: Turn) -> str:
    found = figures([Answered(0, "", (turn,))], PLAIN)
    rate = f"{found.acceleration:.2f} tokens a step" if found else "no step was timed"
    said = "The context had no room for an answer." if turn.answer is None else turn.answer
    return (
        f'<div class="asked">{escape(turn.question)}</div>'
        f'<div class="said">{escape(said)}</div><div class="soft">{rate}</div>'
    )
