"""ControlTokens: tells a tokenizer's control tokens from the same text typed by a user."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Model, WordLevel

OPEN, CLOSE = "\u27e6", "\u27e7"  # brackets that no normaliser changes
NOTHING = f"{OPEN}none{CLOSE}"  # the only entry of a vocabulary that has added tokens alone
ANCHORS = ("\n", ".", "x")  # texts put before one that continues existing ids


class Typed(NamedTuple):
    """A span text[start:end] that a user typed: added tokens in it are plain text."""

    start: int
    end: int


class _Match(NamedTuple):
    start: int
    end: int
    token: str


class ControlTokens:
    """The added tokens that a message must not be able to produce.

    These are all added tokens, except white space that the model has as the same id. `hide`
    replaces them in typed text by placeholders, so that a chat template never sees them; `restore`
    puts the text back and returns its spans; `ids` tokenises the result. The ids are those of the
    whole text tokenised at once, except that typed text never becomes a control token: the tokens
    that the template wrote get names that nobody can type, and a copy of the tokenizer that knows
    only those names splits the text. No character is added or lost.
    """

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a fast transformers tokenizer."""
        backend = tokenizer.backend_tokenizer
        self._tokenizer = tokenizer
        self._model = backend.model
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._whole = _spells_whole_words(self._model, self._added.values())
        self._ids = {t.content: id for id, t in self._added.items() if not self._is_space(id)}
        self._nonce = f"{secrets.randbelow(10**20):020}"
        self._hidden = re.compile(f"{OPEN}{self._nonce}([0-9]+){CLOSE}")
        self._names = {token: self._name(place) for place, token in enumerate(self._ids)}
        self._known = {name: self._ids[token] for token, name in self._names.items()}
        self._finder = _copy(backend, WordLevel({NOTHING: 0}, NOTHING), splits=False)
        self._finder.add_tokens(list(self._added.values()))
        self._renamed = _copy(backend, self._model)
        self._renamed.add_tokens([_renamed(t, self._names) for t in self._added.values()])
        alone, amid = self.ids("a"), self.ids("\na")
        self._begins_words = amid[-len(alone) :] != alone  # the first word of a text gets a prefix

    def hide(self, typed: str, hidden: list[str]) -> str:
        """The text with a placeholder for each span that would become a control token; the spans
        are appended to `hidden`. Spaces around the text stay, for the template to trim."""
        parts, at = [], 0
        first, last = len(typed) - len(typed.lstrip()), len(typed.rstrip())
        for match in self._matches(typed):  # some tokens include the spaces around them
            start, end = max(match.start, first), min(match.end, last)
            if start < end:
                parts += [typed[at:start], self._name(len(hidden))]
                hidden.append(typed[start:end])
                at = end
        return "".join(parts) + typed[at:]

    def restore(self, text: str, hidden: Sequence[str]) -> tuple[str, list[Typed]]:
        """The text with the hidden spans put back, and their places in it."""
        parts, spans, at, length = [], [], 0, 0
        for mark in self._hidden.finditer(text) if hidden else ():
            typed = hidden[int(mark[1])]
            parts += [text[at : mark.start()], typed]
            start = length + mark.start() - at
            at, length = mark.end(), start + len(typed)
            spans.append(Typed(start, length))
        return "".join(parts) + text[at:], spans

    def ids(self, text: str, spans: Sequence[Typed] = ()) -> list[int]:
        """The token ids of a text; typed spans are plain text."""
        if not spans:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        parts, at = [], 0
        for match in self._matches(_masked(text, spans)):
            parts += [text[at : match.start], self._names[match.token]]
            at = match.end
        return self._named_ids("".join(parts) + text[at:])

    def ids_after(self, text: str, spans: Sequence[Typed] = ()) -> list[int]:
        """The token ids of a text that continues earlier ids: without the prefix that a tokenizer
        adds to the first word of a text."""
        for anchor in ANCHORS if self._begins_words else ():
            alone, moved = self.ids(anchor), [Typed(s + 1, e + 1) for s, e in spans]
            joint = self.ids(anchor + text, moved)
            if joint[: len(alone)] == alone:
                return joint[len(alone) :]
        return self.ids(text, spans)

    def _is_space(self, id: int) -> bool:
        """Whether the token is white space that the vocabulary has under the same id, like Gemma's
        line ends: then it makes no difference who wrote it."""
        space = self._added[id].content
        return space.isspace() and self._model.token_to_id(space) == id

    def _name(self, place: int) -> str:
        return f"{OPEN}{self._nonce}{place}{CLOSE}"

    def _matches(self, text: str) -> Iterator[_Match]:
        """Where the tokenizer would see control tokens in a text, in order."""
        encoding = self._finder.encode(text, add_special_tokens=False)
        for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            if token in self._ids:
                yield _Match(start, end, token)

    def _named_ids(self, text: str) -> list[int]:
        """The ids of a text whose control tokens are renamed. Where the vocabulary itself matches
        one in typed text, its characters are tokenised one by one."""
        encoding = self._renamed.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, id in zip(encoding.tokens, encoding.ids, strict=True):
            if token in self._whole:
                ids += [part.id for character in token for part in self._model.tokenize(character)]
            else:
                ids.append(self._known.get(token, id))
        return ids


def _copy(backend: Tokenizer, model: Model, *, splits: bool = True) -> Tokenizer:
    """The same tokenizer without added tokens; the model is shared."""
    copy = Tokenizer(model)
    if backend.normalizer is not None:
        copy.normalizer = backend.normalizer
    if splits and backend.pre_tokenizer is not None:
        copy.pre_tokenizer = backend.pre_tokenizer
    return copy


def _renamed(token: AddedToken, names: Mapping[str, str]) -> AddedToken:
    return AddedToken(
        names.get(token.content, token.content),
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
    )


def _spells_whole_words(model: Model, added: Any) -> frozenset[str]:
    """The added tokens that the vocabulary would match in plain text. BPE with merges produces only
    what the merges make, which is text by the file's own rules; a vocabulary that is looked up
    whole matches every token in it. Words and spaces may match."""
    if isinstance(model, BPE) and not model.ignore_merges:
        return frozenset()
    texts = (token.content for token in added if model.token_to_id(token.content) is not None)
    return frozenset(text for text in texts if len(text) > 1 and not _is_wordlike(text))


def _is_wordlike(text: str) -> bool:
    return all(character.isalnum() or character.isspace() for character in text.replace("▁", " "))


def _masked(text: str, spans: Sequence[Typed]) -> str:
    """The text at the same length, with typed spans masked so that no token matches in them."""
    parts, at = [], 0
    for start, end in spans:
        parts += [text[at:start], OPEN * (end - start)]
        at = end
    return "".join(parts) + text[at:]
