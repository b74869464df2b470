"""What a reader keeps as a file: a conversation as Markdown, an answer with its steps as HTML."""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from medusa_chat.paths import asset
from medusa_chat.runtime.stored_conversation import StoredConversation
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.step_panel import replay_line
from medusa_chat.ui.page.shell import NAME as PLACE
from medusa_chat.ui.page.shell import modules
from medusa_chat.ui.page.tree_view import to_line

if TYPE_CHECKING:
    from markdown_it.token import Token

SPEAKERS = {"user": "You", "assistant": "medusa-chat"}
FORBIDDEN = re.compile(r"[^\w ().,-]+")  # what no file's name has on every system
LONGEST_NAME = 60  # characters
PROBE = "what comes next"
OPENS = re.compile(r"```|~~~|<[a-z!?]", re.IGNORECASE)  # without these nothing stays open
ENDS = {"<!--": "-->", "<?": "?>", "<![CDATA[": "]]>", "<!": ">"}  # of HTML that is no element
# Elements that a browser shows as something else than text, or not: up to their end, all of it. In
# those of LITERAL no other tag counts.
LITERAL = ("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes")
HIDING = (
    "template", "select", "details", "dialog", "svg", "math", "noscript", "object", "pre", "audio",
    "video", "canvas", "datalist",
)  # fmt: skip
TAG = re.compile(rf"<(/?)({'|'.join((*LITERAL, *HIDING))})\b|<!--", re.IGNORECASE)


class SavedFile(NamedTuple):
    """name: of the file, with its ending; text: all of it, UTF-8."""

    name: str
    text: str

    @classmethod
    def of(cls, kept: StoredConversation) -> "SavedFile":
        """The messages that are shown, whole and as they were written; where one leaves a block of
        code or of HTML open, its end stands behind it."""
        text = "\n\n".join(closed(part) for part in _parts(kept)) + "\n"
        return cls(f"{file_name(kept.title) or 'conversation'}.md", text)


def file_name(title: str) -> str:
    """A title as the name of a file on every system, without an ending; may be empty."""
    return " ".join(FORBIDDEN.sub(" ", title).split())[:LONGEST_NAME].strip(" .")


def _parts(kept: StoredConversation) -> Iterator[str]:
    yield f"# {' '.join(kept.title.split())}"
    if kept.system:
        yield f"## System prompt\n\n{kept.system}"
    for one in kept.tree.path:
        thought = "".join(f"> {line}\n" for line in one.reasoning.splitlines())
        yield f"## {SPEAKERS[one.role]}\n\n{thought}{thought and chr(10)}{one.content}"
        if one.note:
            yield f"*{one.note}*"
        if one.figures:
            yield f"*{one.figures.line}*"


def closed(text: str) -> str:
    """The text, with the end of a block that would take in what follows, by CommonMark's rules:
    only a parser of them knows, as a list or a quotation ends the blocks in it."""
    if not OPENS.search(text):
        return text
    from markdown_it import MarkdownIt

    blocks = MarkdownIt("commonmark").disable("inline")
    while end := _end(blocks.parse(f"{text}\n\n# {PROBE}")):
        text = f"{text.removesuffix(chr(10))}\n{end}"
    if TAG.search(text):
        tags = _end_tags(MarkdownIt("commonmark").parse(text))
        text = f"{text}\n\n{tags}" if tags else text
    return text


def _end(tokens: "list[Token]") -> str:
    """What ends the block that has taken in the heading behind it; empty where none has."""
    last = tokens[-1]
    if last.type == "heading_close":
        return ""
    if last.type != "html_block":
        return last.markup if last.type == "fence" else ""
    begin = last.content.lstrip()
    end = next((end for start, end in ENDS.items() if begin.startswith(start)), "")
    return end or "</" + re.split(r"[^a-zA-Z]", begin[1:], maxsplit=1)[0] + ">"


def _end_tags(tokens: "list[Token]") -> str:
    """The ends of what is open behind a text, elements and a comment, and hides what follows."""
    every = (inner for token in tokens for inner in (token, *(token.children or ())))
    html = "".join(one.content for one in every if one.type in ("html_block", "html_inline"))
    opened: list[str] = []
    at, comment = 0, ""
    while not comment and (tag := TAG.search(html, at)):
        name, last = (tag[2] or "").lower(), opened[-1] if opened else ""
        at = tag.end()
        if last in LITERAL and (name != last or not tag[1]):
            continue
        if not name:  # a comment, whose end may share the two dashes
            at = html.find("-->", tag.start() + 2) + 3
            comment = "" if at > 2 else "<!-- -->"
        elif not tag[1]:
            opened.append(name)
        elif name in opened:
            del opened[len(opened) - 1 - opened[::-1].index(name) :]
    return comment + "".join(f"</{name}>" for name in reversed(opened))


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
            "name": PLACE,
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
        text = IMPORTED.sub(rf'\1{PLACE}\2";', text)
        found[name] = base64.b64encode(text.encode()).decode()
    head = "data:text/javascript;base64,"
    return json.dumps({"imports": {f"{PLACE}{name}": head + data for name, data in found.items()}})


@cache
def style() -> str:
    """The colours of the page, and the style of the microscope and of the file."""
    page = (asset("css", "page.css")).read_text(encoding="utf-8")
    colours = page[: page.index(".gradio-container")]
    others = (asset("css", f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
    return "\n".join((colours, *others))
