"""The tokenizer of a GGUF file: its vocabulary, and the rules by which llama.cpp reads text.

Built here of its parts: the classes of transformers add tokens of their own, which get ids beyond
the embeddings, and write what is not of the byte alphabet (DeepSeek's <｜User｜>) in bytes.
"""

from collections.abc import Collection, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.checkpoints.layouts.gguf_header import (
    KINDS,
    MERGES,
    MODEL,
    SCORES,
    TEMPLATE,
    TOKENS,
    read_vocabulary,
)
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.layouts.text_splits import BEGUN, SPLIT, SPLITS, UNSPLIT, WHOLE
from medusa_chat.decoding.detokenizer import BYTES, CHARACTERS
from medusa_chat.errors import ModelError, UsageError, first_line, is_panic

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # kinds of tokens that are found in a text as they are
SPACE = "\u2581"  # how a sentencepiece vocabulary writes a space
GEMMAS = ("gemma", "gemma2", "gemma3")
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
USUAL = {"bos": 1, "eos": 2, "unknown": 0}  # ids of sentencepiece's, where a file has none
BEGIN = "{{ bos_token }}"
STRIPS = ("phi-3", "phi3")  # names of models in whose files space behind a special token is none
KEEPS = ("<unk>", "<s>", "<|endoftext|>")  # but for these tokens
NAME, FAMILY = "general.name", "general.architecture"
ADDS, ADDS_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
PREFIX = "tokenizer.ggml.add_space_prefix"
ALPHABET = frozenset(BYTES)


def write_tokenizer(folder: Path, file: Path) -> None:
    """Save the tokenizer of a GGUF file into a folder. What lies beside the file is not read, which
    `from_pretrained` would do. Raises ModelError for one that cannot be built."""
    vocabulary = read_vocabulary(LocalFolder(file.parent, only=file.name), file.name)
    try:
        _tokenizer(vocabulary).save_pretrained(folder)
    except BaseException as error:  # all kinds, for odd vocabularies
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ModelError(f"the tokenizer in {file} cannot be read: {first_line(error)}") from error


def _tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """metadata: of a file, with its vocabulary whole."""
    kind, split = metadata[MODEL], str(metadata.get(SPLIT))
    kind = "gemma4" if split in UNSPLIT else kind
    tokens, kinds = metadata[TOKENS], metadata.get(KINDS) or ()
    numbers = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ROLES}
    if kind == "llama":
        usual = {name: n for name, n in USUAL.items() if kinds[n : n + 1] in ([UNKNOWN], [CONTROL])}
        numbers |= {name: n for name, n in usual.items() if numbers[name] is None}
    roles = {ROLES[name]: tokens[n] for name, n in numbers.items() if n is not None}
    if kind == "gpt2":
        known = {number for number in numbers.values() if number is not None}
        backend = _byte_level(metadata, split, known)
    else:
        backend = _sentencepiece(kind, metadata, roles.get("unk_token"))
    _add_tokens(backend, metadata)
    told = metadata.get(ADDS)
    begins = told if isinstance(told, bool) else kind == "llama" or split in BEGUN
    tokenizer = _around(
        backend,
        **roles,
        chat_template=metadata.get(TEMPLATE),
        add_bos_token=begins or kind == "gemma4",  # whatever the file says, as llama.cpp does
        add_eos_token=bool(metadata.get(ADDS_EOS)),
    )
    _begin_chats(tokenizer)
    return tokenizer


def _around(backend: Tokenizer, **named: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of transformers around one of the library's own, which it takes as classes of
    its own do: what is given to it is copied through JSON, which takes as long as all else."""
    tokenizer = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = backend
    PreTrainedTokenizerFast.__init__(tokenizer, **named)
    return tokenizer


def _special(metadata: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """(id, text, kind) of each token that is found in a text as it is."""
    tokens, kinds = metadata[TOKENS], metadata.get(KINDS) or ()
    for number, kind in enumerate(kinds):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            yield number, tokens[number], kind


def _byte_level(metadata: Mapping[str, Any], split: str, known: set[int]) -> Tokenizer:
    """A vocabulary of bytes. known: ids of special tokens, whose texts are no bytes."""
    known = known | {number for number, _, _ in _special(metadata)}
    ids = {
        token if ALPHABET.issuperset(token) or number in known else _in_bytes(token): number
        for number, token in enumerate(metadata[TOKENS])
    }
    backend = Tokenizer(models.BPE(ids, _merges(metadata), ignore_merges=split in WHOLE))
    rules = SPLITS.get(split)
    usual = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = usual if rules is None else _split(rules)
    backend.decoder = decoders.ByteLevel()
    return backend


def _in_bytes(text: str) -> str:
    return "".join(CHARACTERS[byte] for byte in text.encode())


def _split(rules: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """By each expression in turn, then to the alphabet of bytes."""
    cuts = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in rules]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, whole])


def _sentencepiece(kind: str, metadata: Mapping[str, Any], unknown: str | None) -> Tokenizer:
    """A vocabulary whose spaces are written, with a token for each byte. A space is put before a
    text and behind special tokens, but for Gemma's and where the file says otherwise."""
    is_gemma = kind == "gemma4" or metadata.get(FAMILY) in GEMMAS
    tokens = metadata[TOKENS]
    if is_gemma:  # the file has runs of spaces as they are
        tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    ids = {token: number for number, token in enumerate(tokens)}
    if MERGES in metadata:
        merges = _merges(metadata)
    else:
        kinds = metadata.get(KINDS) or ()
        scores = dict(zip(tokens, metadata[SCORES], strict=True))
        ranks = {token: -number for token, number in ids.items()} if is_gemma else scores
        special = {t for t, kind in zip(tokens, kinds, strict=False) if kind in (UNKNOWN, CONTROL)}
        merges = _ranked_merges(ids.keys() - special, ranks)
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Replace(" ", SPACE)
    if not is_gemma and metadata.get(PREFIX) is not False:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        back.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(back)
    return backend


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of tokens that are merged. A space between them is the first behind a character,
    for a token may begin with one."""
    places = ((merge, merge.find(" ", 1)) for merge in metadata[MERGES])
    return [(m[:at], m[at + 1 :]) if at > 0 else (m, "") for m, at in places]


def _ranked_merges(tokens: Collection[str], ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes another: those that make the one of the highest rank first,
    of these the one with the longest beginning. transformers' generate_merges gives the same."""
    ranked = sorted(ranks.items(), key=itemgetter(1), reverse=True)
    found = [
        (token[:at], token[at:], rank)
        for token, rank in ranked
        if token in tokens
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in tokens and token[at:] in tokens
    ]
    if len(set(ranks.values())) < len(ranks):  # of tokens of one rank the beginnings decide
        found.sort(key=lambda one: (one[2], len(one[0]), len(one[1])), reverse=True)
    return [(first, second) for first, second, _ in found]


def _add_tokens(backend: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Have tokens that are found in a text as they are matched there."""
    name = str(metadata.get(NAME)).lower()
    added = [
        AddedToken(
            token,
            normalized=False,
            special=kind != USER_DEFINED,
            rstrip=any(one in name for one in STRIPS) and token not in KEEPS,
        )
        for _, token, kind in _special(metadata)
        if backend.token_to_id(token) is not None
    ]
    backend.add_tokens(added)


def _begin_chats(tokenizer: PreTrainedTokenizerFast) -> None:
    """Have a chat begin with BOS where a text does and the chat template does not write it."""
    template, bos = tokenizer.chat_template, tokenizer.bos_token
    if not template or tokenizer("")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return
    user = {"role": "user", "content": "1"}
    for messages in ([user], [{"role": "system", "content": "2"}, user]):
        try:
            if renderer().render(tokenizer, messages).startswith(str(bos)):
                return
        except UsageError:
            if "bos_token" in template or str(bos) in template:
                return
    tokenizer.chat_template = BEGIN + template
