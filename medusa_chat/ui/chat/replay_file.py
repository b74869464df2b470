"""ReplayFile: an answer with its steps as one HTML file, which replays them without a server."""

import base64
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from medusa_chat.paths import asset
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.saved_file import file_name
from medusa_chat.ui.chat.step_panel import replay_line
from medusa_chat.ui.page.scripts import NAME, modules
from medusa_chat.ui.page.tree_view import to_line

STYLES = ("tree", "replay_file")
ENTRY = "replay_file.js"
IMPORTED = re.compile(r'^(import [^;]*?"|\} from "|import ")\./([\w.]+)";', re.MULTILINE)
# Nothing is fetched: what the file needs is in it.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>medusa-chat</title>
<style>{style}</style>
<script type="importmap">{places}</script>
<script type="application/json" id="known">{known}</script>
<script type="application/json" id="recorded">{recorded}</script>
</head>
<body class="replay-file">
<main><section id="said"></section><section id="right"><div id="tree"></div></section></main>
<script type="module">import "{name}{entry}";</script>
</body>
</html>
"""


class ReplayFile(NamedTuple):
    """name: of the file, with its ending; text: all of it, UTF-8."""

    name: str
    text: str

    @classmethod
    def of(
        cls,
        answer: Answer,
        question: str,
        title: str,
        plain: float | None,
        known: Mapping[str, object],
    ) -> "ReplayFile":
        """An answer whose steps are here. plain: tokens per second of plain decoding. known: what
        the page's scripts know from the start. Texts stand in JSON alone, in which nothing ends its
        element."""
        recorded: dict[str, Any] = {
            "title": title,
            "question": question,
            "text": answer.text,
            **replay_line(answer, plain),
        }
        parts = {
            "policy": POLICY,
            "style": style(),
            "places": inlined(ENTRY),
            "known": to_line(dict(known)),
            "recorded": to_line(recorded),
            "name": NAME,
            "entry": ENTRY,
        }
        text = re.sub(r"\{(\w+)\}", lambda field: parts[field[1]], PAGE)
        return cls(f"{file_name(title) or 'answer'}.html", text)


@cache
def inlined(entry: str) -> str:
    """An import map of a module and all that it imports, each in the map itself."""
    found, waiting = dict[str, str](), [entry]
    code = modules()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        text = code[name].decode()
        waiting += [other for _, other in IMPORTED.findall(text)]
        text = IMPORTED.sub(rf'\1{NAME}\2";', text)
        found[name] = base64.b64encode(text.encode()).decode()
    head = "data:text/javascript;base64,"
    return json.dumps({"imports": {f"{NAME}{name}": head + data for name, data in found.items()}})


@cache
def style() -> str:
    """The colours of the page, and the style of the microscope and of the file."""
    page = (asset("css", "page.css")).read_text(encoding="utf-8")
    colours = page[: page.index(".gradio-container")]
    others = (asset("css", f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
    return "\n".join((colours, *others))
