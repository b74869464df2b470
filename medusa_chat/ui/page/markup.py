"""Markup: a text kept from being HTML where Gradio draws it as Markdown; its formulas. No gradio.

A mark that nobody sees stands behind each "<" and "&" that would begin a tag or an entity: neither
Markdown nor a browser takes them for one then, in words, code and formulas alike. The page's script
(assets/js/inert.js) marks the text that comes, by these rules, and takes the marks out of what is
drawn, edited and copied. A single dollar may be a price: formulas between two of them get
delimiters that are drawn.
"""

import re

MARK = "\ufeff"
# In the syntax that Python and JavaScript share. An address is left as it is, and stays a link.
BEGINS = r"(https?://[^\s<>]*)|<(?=[a-z/!?])(?!(?:https?|mailto):)|&(?=#?[a-z0-9]+;)"
# A block of code is left as it is, for its colours: but only where nothing is in the text by which
# Gradio may take for no code what looks like it.
FENCE = r"(?<![^\n])(```[^`\n]*\n(?:(?:[\s\S]*?\n)??```~* *(?![^\n])|[\s\S]*))"
ODD = r"\r|~~~|[^\n]```|mermaid|\$\$|\\[(\[]|(?<![^\n]) {0,3}\["
RULES = {"mark": MARK, "begins": BEGINS, "fence": FENCE, "odd": ODD}
_ANY, _ODD = re.compile(BEGINS, re.IGNORECASE), re.compile(ODD)
_BESIDE_CODE = re.compile(f"{FENCE}|{BEGINS}", re.IGNORECASE)
# What Gradio draws by itself. A single dollar is none of them: it would take "$5, or $6" for one.
DELIMITERS = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
CODE = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]*`)", re.DOTALL)
# Pandoc's rule: no space inside the dollars, no digit after them, all in one line.
BETWEEN_DOLLARS = re.compile(r"(?<![\\$\w])\$(?=[^\s$])([^$\n]*?(?<=[^\s\\]))\$(?![\w$])")


def inert(text: str) -> str:
    """The text with its marks."""
    begins = _ANY if _ODD.search(text) else _BESIDE_CODE
    return begins.sub(lambda match: match[0] + ("" if any(match.groups()) else MARK), text)


def with_drawn_dollars(text: str) -> str:
    """The text with formulas between single dollars in delimiters that Gradio draws. A mark
    stands outside of each, by which the page's script knows it from the model's own: what is copied
    and edited has the dollars again."""
    parts = CODE.split(text)
    parts[::2] = [BETWEEN_DOLLARS.sub(rf"{MARK}\\(\1\\){MARK}", part) for part in parts[::2]]
    return "".join(parts)
