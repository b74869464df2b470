"""Formulas in answers: the delimiters that are drawn as maths, and dollars that are prices."""

import re

# What Gradio draws by itself. A single dollar is none of them: it would take "$5, or $6" for one.
DELIMITERS = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
CODE = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]*`)", re.DOTALL)
# Pandoc's rule: no space inside the dollars, no digit after them, all in one line.
BETWEEN_DOLLARS = re.compile(r"(?<![\\$\w])\$(?=[^\s$])([^$\n]*?(?<=[^\s\\]))\$(?![\w$])")

DRAWN = re.compile(r"\\\((.+?)\\\)")


def with_drawn_dollars(text: str) -> str:
    """The text with formulas between single dollars in delimiters that Gradio draws."""
    parts = CODE.split(text)
    parts[::2] = [BETWEEN_DOLLARS.sub(r"\\(\1\\)", part) for part in parts[::2]]
    return "".join(parts)


def as_written(text: str, before: str) -> str:
    """A text that was edited, with single dollars where the browser was given delimiters for those
    of the text before."""
    is_own = any("\\(" in part for part in CODE.split(before)[::2])
    if is_own or with_drawn_dollars(before) == before:
        return text
    parts = CODE.split(text)
    parts[::2] = [DRAWN.sub(r"$\1$", part) for part in parts[::2]]
    return "".join(parts)
