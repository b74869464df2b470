"""ControlTokens: a tokenizer's added tokens, kept apart from the same text typed by a person."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Model, WordLevel

OPEN, CLOSE = "\u27e6", "\u27e7"  # brackets that no normaliser changes
NOTHING = f"{OPEN}none{CLOSE}"  # the one entry of a vocabulary that is only asked for added tokens
ANCHORS = ("\n", ".", "x")  # texts to stand before what goes on from ids that are there already


class Typed(NamedTuple):
    """A stretch text[start:end] in which added tokens are only text."""

    start: int
    end: int


class _Match(NamedTuple):
    start: int
    end: int
    token: str


class ControlTokens:
    """The added tokens that a message must not be able to write.

    Those are all but white space that is this token as text, too. `hide` takes them out
    of what was typed, so that a chat template never sees them; `restore` puts them back where the
    template left them and says where that is; `ids` tokenises such a text. The ids are those of the
    whole text tokenised at once, except that nothing typed becomes a control token: the tokens that
    the template wrote are given names that nobody can type, and a copy of the tokenizer that knows
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
        self._begins_words = amid[-len(alone) :] != alone  # something stands before a first word

    def hide(self, typed: str, hidden: list[str]) -> str:
        """The text with a placeholder for each stretch that would become a control token; the
        stretches go to `hidden`. Spaces around the text stay, for a template to trim."""
        parts, at = [], 0
        first, last = len(typed) - len(typed.lstrip()), len(typed.rstrip())
        for match in self._matches(typed):  # some take the spaces beside them along
            start, end = max(match.start, first), min(match.end, last)
            if start < end:
                parts += [typed[at:start], self._name(len(hidden))]
                hidden.append(typed[start:end])
                at = end
        return "".join(parts) + typed[at:]

    def restore(self, text: str, hidden: Sequence[str]) -> tuple[str, list[Typed]]:
        """The text with what was hidden, and where that stands in it."""
        parts, spans, at, length = [], [], 0, 0
        for found in self._hidden.finditer(text) if hidden else ():
            typed = hidden[int(found[1])]
            parts += [text[at : found.start()], typed]
            start = length + found.start() - at
            at, length = found.end(), start + len(typed)
            spans.append(Typed(start, length))
        return "".join(parts) + text[at:], spans

    def ids(self, text: str, spans: Sequence[Typed] = ()) -> list[int]:
        """The token ids of a text, in which what was typed is text."""
        if not spans:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        parts, at = [], 0
        for match in self._matches(_masked(text, spans)):
            parts += [text[at : match.start], self._names[match.token]]
            at = match.end
        return self._named_ids("".join(parts) + text[at:])

    def ids_after(self, text: str, spans: Sequence[Typed] = ()) -> list[int]:
        """The token ids of a text that goes on from ids that are there: what a tokenizer puts
        before a text's first word is left out, as it is amid a text."""
        for anchor in ANCHORS if self._begins_words else ():
            alone, moved = self.ids(anchor), [Typed(s + 1, e + 1) for s, e in spans]
            joint = self.ids(anchor + text, moved)
            if joint[: len(alone)] == alone:
                return joint[len(alone) :]
        return self.ids(text, spans)

    def _is_space(self, id: int) -> bool:
        """Whether it is white space that the model itself has as this id, as line ends of Gemma
        are: it makes no difference who wrote it."""
        space = self._added[id].content
        return space.isspace() and self._model.token_to_id(space) == id

    def _name(self, place: int) -> str:
        return f"{OPEN}{self._nonce}{place}{CLOSE}"

    def _matches(self, text: str) -> Iterator[_Match]:
        """Where the tokenizer would see control tokens in a text, in order."""
        found = self._finder.encode(text, add_special_tokens=False)
        for token, (start, end) in zip(found.tokens, found.offsets, strict=True):
            if token in self._ids:
                yield _Match(start, end, token)

    def _named_ids(self, text: str) -> list[int]:
        """The ids of a text whose control tokens have their new names. Where the model itself finds
        one in what was typed, its characters are tokenised one by one."""
        found, ids = self._renamed.encode(text, add_special_tokens=False), list[int]()
        for token, id in zip(found.tokens, found.ids, strict=True):
            if token in self._whole:
                ids += [part.id for character in token for part in self._model.tokenize(character)]
            else:
                ids.append(self._known.get(token, id))
        return ids


def _copy(backend: Tokenizer, model: Model, *, splits: bool = True) -> Tokenizer:
    """A tokenizer without added tokens that treats text as this one does; the model is shared."""
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
    """The added tokens that the model would find in plain text by itself. One whose merges are
    followed finds only what they make, which is text by the file's own rules; a vocabulary that is
    looked up whole finds every token in it. Words and spaces are left to it."""
    if isinstance(model, BPE) and not model.ignore_merges:
        return frozenset()
    texts = (token.content for token in added if model.token_to_id(token.content) is not None)
    return frozenset(text for text in texts if len(text) > 1 and not _is_wordlike(text))


def _is_wordlike(text: str) -> bool:
    return all(character.isalnum() or character.isspace() for character in text.replace("▁", " "))


def _masked(text: str, spans: Sequence[Typed]) -> str:
    """The text, as long, in which no token can be found in what was typed."""
    parts, at = [], 0
    for start, end in spans:
        parts += [text[at:start], OPEN * (end - start)]
        at = end
    return "".join(parts) + text[at:]
