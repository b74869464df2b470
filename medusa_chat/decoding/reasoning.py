"""ReasoningReader: splits an answer into reasoning and reply while it is streamed."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

# of an answer; "opened": reasoning without any text yet; "header": in the header of a channel
State = Literal["begin", "opened", "reasoning", "answer", "header"]
BETWEEN = "\n\n"  # two passages of reasoning, and two of the reply
LONGEST_HEADER = 200  # characters; a longer one is an answer without channels


class Part(NamedTuple):
    """A part of an answer, or all of it: its reasoning, and the text of the reply."""

    reasoning: str = ""
    text: str = ""

    def plus(self, other: "Part") -> "Part":
        """This part followed by another."""
        return Part(self.reasoning + other.reasoning, self.text + other.text)


class Markup(NamedTuple):
    """How a model marks reasoning: from `open` to `close`. begin, end: both with the white space
    around them, to write an answer that the model continues. A word in `begin` after `open` is a
    heading, not reasoning."""

    open: str
    close: str
    begin: str
    end: str

    @property
    def heading(self) -> str:
        return self.begin[len(self.open) :].strip()

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that are never shown when they are special tokens."""
        return HARMONY_MARKERS if self == HARMONY else (self.open, self.close)

    def after(self, prompt: str) -> State:
        """The state in which the answer to this prompt begins."""
        if self == HARMONY:
            return _harmony_state(prompt)
        begins = (self.open, self.begin.rstrip())
        return "opened" if prompt.rstrip().endswith(begins) else "begin"

    def written(self, part: Part, prompt: str) -> str:
        """An answer with its reasoning in the model's own markup, for the model to continue.
        prompt: the text before it. Reasoning without a reply stays open."""
        begin = "" if self.after(prompt) == "opened" else self.begin
        return begin + part.reasoning + (self.end + part.text if part.text else "")


HARMONY_MARKERS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")
HARMONY = Markup(
    "<|channel|>",
    "<|end|>",
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)
HIDDEN_CHANNELS = ("analysis", "commentary")
THINK = Markup("<think>", "</think>", "<think>\n", "\n</think>\n\n")
MARKUPS = (  # the first whose markers the chat template or vocabulary has, else THINK
    HARMONY,
    Markup("<|channel>", "<channel|>", "<|channel>thought\n", "\n<channel|>"),
    Markup("[THINK]", "[/THINK]", "[THINK]", "[/THINK]"),
    Markup("<|START_THINKING|>", "<|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    Markup("<seed:think>", "</seed:think>", "<seed:think>", "</seed:think>"),
    THINK,
)


def markup_of(template: str, added: Iterable[str]) -> Markup:
    """The markup of a model's reasoning, by its chat template and its added tokens."""
    known = set(added)

    def has(markup: Markup) -> bool:
        needed = HARMONY_MARKERS[:2] if markup == HARMONY else markup.markers
        return all(marker in known or marker in template for marker in needed)

    return next((markup for markup in MARKUPS if has(markup)), THINK)


def read(text: str) -> Part:
    """Split a whole answer with its markers; if the reasoning never ends, everything is reasoning.
    Harmony's channels leave no markers in a text."""
    for markup in MARKUPS[1:]:
        if text.lstrip().startswith(markup.open):
            reader = ReasoningReader(markup)
            return reader.push(text).plus(reader.finish())
    return Part("", text)


class ReasoningReader:
    """Takes an answer piece by piece and returns its reasoning and its reply.

    `<think>`, and every other marker written as text, counts only at the start of the answer; later
    it is part of the reply. Markers that are special tokens come as tokens, never as text, and
    channel markers count anywhere. White space around markers belongs to them. Text that may be the
    start of a marker is held back.
    """

    def __init__(
        self, markup: Markup, tokens: Mapping[int, str] | None = None, state: State = "begin"
    ) -> None:
        """tokens: the text of each marker that is a special token, by id. state: the one in which
        the answer begins."""
        self.markup = markup
        self.state: State = "reasoning" if state == "opened" else state
        self._tokens = tokens or {}
        spelled = [one for one in markup.markers if one not in self._tokens.values()]
        self._open = markup.open if markup.open in spelled else ""
        self._close = markup.close if markup.close in spelled else ""
        self._held, self._header = "", ""
        self._heading, self._is_fresh = "", state == "opened"  # no text of this passage yet
        self._is_marked, self._sides = False, set[State]()  # sides with text so far

    def is_marker(self, token: int) -> bool:
        """Whether the token is a marker here: pass it to `mark` instead of its text to `push`."""
        marker = self._tokens.get(token)
        if marker is None or self.markup == HARMONY:
            return marker is not None
        if marker == self.markup.close:
            return self.state == "reasoning"
        return self.state == "begin" or (self.state == "answer" and self.markup != THINK)

    def mark(self, token: int) -> Part:
        """Take a marker -> the text held back before it."""
        if self.state in ("begin", "reasoning"):
            self._held = self._held.rstrip()
        before, marker, self._is_marked = self._flush(), self._tokens[token], True
        if self.markup != HARMONY:
            self._enter("reasoning" if marker == self.markup.open else "answer")
        elif marker == "<|message|>":
            is_hidden = self._header.strip().startswith(HIDDEN_CHANNELS)
            self._enter("reasoning" if is_hidden else "answer")
        else:
            self._enter("header")
        return before

    def push(self, text: str) -> Part:
        """Take some text -> the part that is now certain."""
        self._held += text
        part = Part()
        while (more := self._next()) is not None:
            part = part.plus(more)
        return part

    def finish(self) -> Part:
        """The text held back at the end. A header that no marker ended is a reply."""
        if self.state == "header" and not self._is_marked:
            self._held, self.state = self._header, "answer"
        return self._flush()

    def _flush(self) -> Part:
        held, self._held = self._held, ""
        if self.state == "reasoning":
            return self._passage("reasoning", "" if self._is_fresh else held)
        return self._passage("answer", held) if self.state in ("begin", "answer") else Part()

    def _next(self) -> Part | None:
        """The next part of the held text; None if there is none yet."""
        if not self._held:
            return None
        match self.state:
            case "begin":
                return self._begun()
            case "reasoning":
                return self._thought()
            case "answer":
                return self._take("answer", len(self._held))
        self._header, self._held = self._header + self._held, ""
        if len(self._header) <= LONGEST_HEADER:
            return None
        self._held = self._header
        self._enter("answer")
        return Part()

    def _begun(self) -> Part | None:
        """The state after the start of the answer, once it is known."""
        text = self._held.lstrip()
        if self._open and text.startswith(self._open):
            self._held = text[len(self._open) :]
            self._enter("reasoning")
            return Part()
        if not text or (self._open and self._open.startswith(text)):
            return None
        self._enter("answer", is_fresh=False)
        return Part()

    def _thought(self) -> Part | None:
        """The reasoning that is certain, up to where it may end."""
        if self._is_fresh:
            self._held = self._held.lstrip()
            if self._heading and self._held.startswith(self._heading):
                self._held, self._heading = self._held[len(self._heading) :], ""
                return Part()
            if not self._held or (self._heading and self._heading.startswith(self._held)):
                return None
        end = self._held.find(self._close) if self._close else -1
        if end >= 0:
            part = self._take("reasoning", len(self._held[:end].rstrip()))
            self._held = self._held.lstrip()[len(self._close) :]
            self._enter("answer")
            return part
        length = len(self._held) - _overlap(self._held, self._close)
        length = len(self._held[:length].rstrip())
        return self._take("reasoning", length) if length else None

    def _take(self, side: State, length: int) -> Part:
        text, self._held = self._held[:length], self._held[length:]
        return self._passage(side, text)

    def _passage(self, side: State, text: str) -> Part:
        """A passage of one side, separated from that side's earlier text."""
        text = text.lstrip() if self._is_fresh else text
        if not text:
            return Part()
        text = BETWEEN + text if self._is_fresh and side in self._sides else text
        self._is_fresh, self._heading = False, ""
        self._sides.add(side)
        return Part(text, "") if side == "reasoning" else Part("", text)

    def _enter(self, state: State, is_fresh: bool = True) -> None:
        self.state, self._header, self._is_fresh = state, "", is_fresh
        self._heading = self.markup.heading if self.markup != HARMONY else ""


def _overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the marker."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(marker[:n])), 0)


def _harmony_state(prompt: str) -> State:
    """The state after a prompt of Harmony: a header unless a message was begun."""
    match = re.search(r"<\|start\|>assistant(<\|channel\|>\w*)?(<\|message\|>)?\Z", prompt.rstrip())
    if match is None:
        return "begin"
    if not match[2]:
        return "header"
    is_hidden = (match[1] or "").endswith(HIDDEN_CHANNELS)
    return "opened" if is_hidden else "answer"
