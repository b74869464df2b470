"""Markup: a text kept from being HTML where Gradio draws it as Markdown. No gradio.

A mark that nobody sees stands behind each "<" and "&" that would begin a tag or an entity: neither
Markdown nor a browser takes them for one then, in words, code and formulas alike. The page's script
(assets/js/inert.js) marks the text that comes, by these rules, and takes the marks out of what is
drawn, edited and copied.
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


def inert(text: str) -> str:
    """The text with its marks."""
    begins = _ANY if _ODD.search(text) else _BESIDE_CODE
    return begins.sub(lambda match: match[0] + ("" if any(match.groups()) else MARK), text)
