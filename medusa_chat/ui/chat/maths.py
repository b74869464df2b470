"""Formulas in answers: the delimiters that are drawn as maths, and dollars that are prices."""

import re

from medusa_chat.ui.chat.markup import MARK

# What Gradio draws by itself. A single dollar is none of them: it would take "$5, or $6" for one.
DELIMITERS = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
CODE = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]*`)", re.DOTALL)
# Pandoc's rule: no space inside the dollars, no digit after them, all in one line.
BETWEEN_DOLLARS = re.compile(r"(?<![\\$\w])\$(?=[^\s$])([^$\n]*?(?<=[^\s\\]))\$(?![\w$])")


def with_drawn_dollars(text: str) -> str:
    """The text with formulas between single dollars in delimiters that Gradio draws. A mark of
    ui/chat/markup.py stands outside of each, by which the page's script knows it from the model's
    own: what is copied and edited has the dollars again."""
    parts = CODE.split(text)
    parts[::2] = [BETWEEN_DOLLARS.sub(rf"{MARK}\\(\1\\){MARK}", part) for part in parts[::2]]
    return "".join(parts)
