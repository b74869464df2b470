"""chart_svg(): the measured rows of a result as one SVG of bars, grouped by unit."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from medusa_chat.bench.rows import Row

WIDE, LEFT, ROW, GROUP, RIGHT = 900, 300, 22, 46, 110
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2937}.unit{font-weight:600}.soft{fill:#6b7280}"
    ".bar{fill:#34a56f}.base{fill:#9ca3af}.spread{stroke:#14532d;stroke-width:1.5}"
)


def chart_svg(result: dict[str, Any]) -> str:
    """A self-contained picture. Bars of one unit share a scale that includes 0; the line at a bar's
    end spans minimum and maximum; grey bars are baselines."""
    groups: dict[str, list[Row]] = {}
    for row in result["rows"]:
        if row["value"] is not None:
            groups.setdefault(row["unit"], []).append(row)
    parts, y = [], 58.0
    for unit, rows in groups.items():
        parts.append(f'<text class="unit" x="16" y="{y:.0f}">{escape(unit)}</text>')
        parts += _bars(rows, y + 10)
        y += GROUP + ROW * len(rows)
    machine = result["machine"]
    parts += [
        f'<text class="unit" x="16" y="22">{escape(str(machine.get("model", "")))}</text>',
        f'<text class="soft" x="16" y="38">{escape(str(machine.get("device", "")))}</text>',
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {y:.0f}" width="{WIDE}">'
    background = f'<rect width="{WIDE}" height="{y:.0f}" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", background, *parts, "</svg>", ""])


def _bars(rows: Sequence[Row], top: float) -> Iterator[str]:
    least = min(0.0, *(row["min"] for row in rows))
    most = max(0.0, *(row["max"] for row in rows))
    scale = (WIDE - LEFT - RIGHT) / ((most - least) or 1.0)

    def x(value: float) -> float:
        return LEFT + (value - least) * scale

    for place, row in enumerate(rows):
        y = top + ROW * place
        value, middle = row["value"], y + ROW / 2
        is_base = row["against"] == row["name"] or row["ratio"] == 1
        ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f}x"
        first, width = min(x(0), x(value)), abs(x(value) - x(0))
        kind = "base" if is_base else "bar"
        label = row["name"] if len(row["name"]) < 44 else f"{row['name'][:42]}…"
        yield f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        yield (
            f'<rect class="{kind}" x="{first:.1f}" y="{y + 3:.1f}" width="{width:.1f}" '
            f'height="{ROW - 6}"><title>{escape(row["note"] or row["name"])}</title></rect>'
        )
        if row["max"] > row["min"]:
            ends = f'x1="{x(row["min"]):.1f}" x2="{x(row["max"]):.1f}"'
            yield f'<line class="spread" {ends} y1="{middle:.1f}" y2="{middle:.1f}"/>'
        after = max(x(row["max"]), x(0)) + 6
        figures = f"{value:.3g}{ratio}"
        yield f'<text class="soft" x="{after:.1f}" y="{middle + 4:.1f}">{escape(figures)}</text>'
