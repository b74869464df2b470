"""The tokenizer of a GGUF file: its vocabulary, and the rules by which llama.cpp reads text.

Built here of its parts: the classes of transformers add tokens of their own, which get ids beyond
the embeddings, and write what is not of the byte alphabet (DeepSeek's <｜User｜>) in bytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.checkpoints.layouts.text_splits import BEGUN, SPLITS, UNSPLIT, WHOLE
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
NAME, ADDS = "general.name", "tokenizer.ggml.add_bos_token"


def write_tokenizer(folder: Path, file: Path, metadata: Mapping[str, Any]) -> None:
    """Save it into a folder. metadata: of the file's header. What lies beside the file is not read,
    which `from_pretrained` would do. Raises ModelError for one that cannot be built."""
    try:
        from transformers.integrations.gguf import get_gguf_tokenizer
    except ImportError as error:
        raise ModelError(
            "GGUF files need transformers 5.23: pip install -U transformers"
        ) from error
    try:
        family, vocabulary, options = get_gguf_tokenizer(str(file))
        _tokenizer(family, vocabulary, options, metadata).save_pretrained(folder)
    except BaseException as error:  # all kinds, for odd vocabularies
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ModelError(f"the tokenizer in {file} cannot be read: {first_line(error)}") from error


def _tokenizer(
    family: str, vocabulary: dict[str, Any], options: Mapping[str, Any], metadata: Mapping[str, Any]
) -> PreTrainedTokenizerFast:
    kind, split = vocabulary["tokenizer_type"], str(vocabulary.get("pre_tokenizer_type"))
    kind = "gemma4" if split in UNSPLIT else kind
    tokens, kinds = vocabulary["tokens"], vocabulary.get("token_type") or ()
    numbers = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ROLES}
    if kind == "llama":
        usual = {name: n for name, n in USUAL.items() if kinds[n : n + 1] in ([UNKNOWN], [CONTROL])}
        numbers |= {name: n for name, n in usual.items() if numbers[name] is None}
    roles = {ROLES[name]: tokens[n] for name, n in numbers.items() if n is not None}
    if kind == "gpt2":
        known = {number for number in numbers.values() if number is not None}
        backend = _byte_level(vocabulary, split, known)
    else:
        backend = _sentencepiece(family, kind, vocabulary, roles.get("unk_token"))
    _add_tokens(backend, vocabulary, str(metadata.get(NAME)).lower())
    told = metadata.get(ADDS)
    begins = told if isinstance(told, bool) else kind == "llama" or split in BEGUN
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **roles,
        chat_template=options.get("chat_template"),
        add_bos_token=begins or kind == "gemma4",  # whatever the file says, as llama.cpp does
        add_eos_token=bool(options.get("add_eos_token")),
    )
    _begin_chats(tokenizer)
    return tokenizer


def _byte_level(vocabulary: Mapping[str, Any], split: str, known: set[int]) -> Tokenizer:
    """A vocabulary of bytes. known: ids of special tokens, whose texts are no bytes."""
    kinds = vocabulary.get("token_type") or ()
    known = known | {n for n, kind in enumerate(kinds) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    ids = {
        token if number in known or all(c in BYTES for c in token) else _in_bytes(token): number
        for number, token in enumerate(vocabulary["tokens"])
    }
    backend = Tokenizer(models.BPE(ids, _merges(vocabulary), ignore_merges=split in WHOLE))
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


def _sentencepiece(
    family: str, kind: str, vocabulary: Mapping[str, Any], unknown: str | None
) -> Tokenizer:
    """A vocabulary whose spaces are written, with a token for each byte. A space is put before a
    text and behind special tokens, but for Gemma's and where the file says otherwise."""
    is_gemma = kind == "gemma4" or family in GEMMAS
    tokens = vocabulary["tokens"]
    if is_gemma:  # the file has runs of spaces as they are
        tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    ids = {token: number for number, token in enumerate(tokens)}
    if "merges" in vocabulary:
        merges = _merges(vocabulary)
    else:
        kinds = vocabulary.get("token_type") or ()
        scores = dict(zip(tokens, vocabulary["scores"], strict=True))
        ranks = {token: -number for token, number in ids.items()} if is_gemma else scores
        special = {t for t, kind in zip(tokens, kinds, strict=False) if kind in (UNKNOWN, CONTROL)}
        merges = generate_merges(ids, ranks, skip_tokens=special)
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Replace(" ", SPACE)
    if not is_gemma and vocabulary.get("add_prefix_space") is not False:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        back.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(back)
    return backend


def _merges(vocabulary: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [merge[:1] + merge[1:].replace(" ", "\0", 1) for merge in vocabulary["merges"]]
    return [(first, second) for first, _, second in (merge.partition("\0") for merge in found)]


def _add_tokens(backend: Tokenizer, vocabulary: Mapping[str, Any], name: str) -> None:
    """Have tokens that are found in a text as they are matched there. name: of the model."""
    ids = backend.get_vocab()
    added = [
        AddedToken(
            token,
            normalized=False,
            special=kind != USER_DEFINED,
            rstrip=any(one in name for one in STRIPS) and token not in KEEPS,
        )
        for token, kind in zip(
            vocabulary["tokens"], vocabulary.get("token_type") or (), strict=False
        )
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token in ids
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
