"""The tokenizer of a checkpoint: read as stored, and completed by a known chat template."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from medusa_chat.checkpoints.layouts.source import LocalFolder, read_json
from medusa_chat.errors import ModelError, first_line, is_panic
from medusa_chat.hub.catalog import KnownTemplate

STORED, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
FILES = (STORED, "tokenizer.model", "vocab.json")
TEMPLATE, TEMPLATES, DEFAULT = "chat_template.jinja", "additional_chat_templates", "default"
OF_PROCESSOR = "chat_template.json"  # where vision-language checkpoints may have the template
FEW = 3  # tokens that a sentence names
LISTS = ("additional_special_tokens", "extra_special_tokens")  # of special tokens without a role


def read_tokenizer(folder: Path, rows: int | None = None) -> Any:
    """The fast tokenizer of a folder. Its tokenizer.json, if any, decides every id: special tokens
    that it lacks are left out. rows: number of tokens with an embedding; unused added tokens beyond
    it are left out, too. Raises ModelError."""
    if not any((folder / name).is_file() for name in FILES):
        raise ModelError(f"{folder} holds no tokenizer: it is incomplete, download it again")
    with _broken(folder):
        read = _stored if (folder / STORED).is_file() else _converted
        tokenizer = read(folder, rows)
    if not tokenizer.chat_template and (folder / OF_PROCESSOR).is_file():
        template = read_json(LocalFolder(folder), OF_PROCESSOR).get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    tokenizer.model_max_length = int(1e30)  # the engine knows the context, and refuses in one line
    return tokenizer


@contextmanager
def _broken(folder: Path) -> Iterator[None]:
    """Raise ModelError for whatever transformers and tokenizers raise for broken files."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ModelError(f"the tokenizer in {folder} is broken: {first_line(error)}") from error


def _stored(folder: Path, rows: int | None) -> Any:
    """The tokenizer.json of a folder, without the rules of the class that the settings name."""
    named = _settings(folder)
    named["chat_template"] = _template(folder, _json(folder, SETTINGS).get("chat_template"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / STORED))
    backend = tokenizer.backend_tokenizer
    if backend.padding is not None:  # the class has added the token that pads
        backend = Tokenizer.from_file(str(folder / STORED))
    within = _within(backend, rows, named, folder)
    if within is not tokenizer.backend_tokenizer:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=within)
    _name(tokenizer, named)
    return tokenizer


def _converted(folder: Path, rows: int | None) -> Any:
    """The tokenizer that transformers makes of other files. Code in the folder is never run."""
    found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if not found.is_fast:
        raise ModelError(f"the tokenizer in {folder} has no fast version: add a tokenizer.json")
    named = found.special_tokens_map | {
        "extra_special_tokens": found.extra_special_tokens,
        "chat_template": found.chat_template,
    }
    backend = _within(found.backend_tokenizer, rows, named, folder)
    if backend is found.backend_tokenizer:
        return found
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    _name(tokenizer, named)
    return tokenizer


def _within(
    backend: Tokenizer, rows: int | None, named: Mapping[str, Any], folder: Path
) -> Tokenizer:
    """The tokenizer without ids from `rows` on, and without padding and truncation. Raises
    ModelError where such an id is used."""
    backend.no_padding()
    backend.no_truncation()
    around = backend.encode("").ids
    if rows is None or (max(around, default=0) < rows and _are_below(backend, rows)):
        return backend
    values = json.loads(backend.to_str())
    refuse_beyond(values, used_texts(named), around, rows, f"the tokenizer in {folder}")
    return Tokenizer.from_str(json.dumps(without_beyond(values, rows)))


def _are_below(backend: Tokenizer, rows: int) -> bool:
    """Whether the id of every token is below `rows`. The whole vocabulary is asked for only where
    ids are left out or shared: it takes as long as half the file."""
    size = backend.get_vocab_size()
    if size <= rows and all(backend.id_to_token(number) is not None for number in range(size)):
        return True
    return max(backend.get_vocab().values(), default=0) < rows


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of a tokenizer, of two files merged as transformers does: that of the newer
    layout wins."""
    settings, special = _json(folder, SETTINGS), _json(folder, SPECIAL)
    return special | settings if "added_tokens_decoder" in settings else settings | special


def _json(folder: Path, name: str) -> dict[str, Any]:
    """A settings file; its size and type were checked before."""
    file = folder / name
    return dict(json.loads(file.read_bytes())) if file.is_file() else {}


def _name(tokenizer: Any, named: Mapping[str, Any]) -> None:
    """Set the special tokens of a tokenizer, by role and in any layout, and its template. The class
    itself would add tokens that the vocabulary lacks."""
    backend = tokenizer.backend_tokenizer
    in_vocabulary = {text for text in _texts(named) if backend.token_to_id(text) is not None}
    known = {role: t for role, value in _roles(named) if (t := token_text(value)) in in_vocabulary}
    usual = tokenizer.SPECIAL_TOKENS_ATTRIBUTES
    tokenizer.SPECIAL_TOKENS_ATTRIBUTES = [*usual, *(role for role in known if role not in usual)]
    for role, text in known.items():
        setattr(tokenizer, role, text)
    special = [one.content for one in backend.get_added_tokens_decoder().values() if one.special]
    listed = [text for text in _listed(named) if text in in_vocabulary]
    tokenizer.extra_special_tokens = list(dict.fromkeys([*listed, *special]))
    tokenizer.chat_template = named.get("chat_template")


def _texts(named: Mapping[str, Any]) -> list[str]:
    """Every special token that is named, once."""
    found = [*(token_text(value) for _, value in _roles(named)), *_listed(named)]
    return [text for text in dict.fromkeys(found) if text]


def _roles(named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(role, token) of every special token that has a role: "bos_token", "image_token"."""
    for group in [named, *(named.get(name) for name in LISTS)]:
        pairs = group.items() if isinstance(group, dict) else ()
        yield from (pair for pair in pairs if pair[0].endswith("_token"))


def _listed(named: Mapping[str, Any]) -> list[str]:
    """The special tokens without a role."""
    groups = [named.get(name) for name in LISTS]
    return [token_text(one) for group in groups if isinstance(group, list) for one in group]


def _template(folder: Path, told: Any) -> Any:
    """The chat template, or several by name: from template files, else from the settings. None
    where several have no default, or the settings hold something else."""
    named = {DEFAULT: folder / TEMPLATE}
    if (folder / TEMPLATES).is_dir():
        named |= {file.stem: file for file in sorted((folder / TEMPLATES).glob("*.jinja"))}
    found = {name: file.read_text("utf-8") for name, file in named.items() if file.is_file()}
    if not found and isinstance(told, list):
        pairs = [(o.get("name"), o.get("template")) for o in told if isinstance(o, dict)]
        found = {n: text for n, text in pairs if isinstance(n, str) and isinstance(text, str)}
    if len(found) > 1:
        return found if DEFAULT in found else None
    return next(iter(found.values()), told if isinstance(told, str) else None)


def left_out(folder: Path, tokenizer: Any) -> list[str]:
    """A sentence that names the special tokens of the settings that were left out, if any."""
    if not (folder / STORED).is_file():
        return []
    named = _settings(folder)
    known = tokenizer.backend_tokenizer.token_to_id
    missing = [repr(text[:40]) for text in _texts(named) if known(text) is None]
    if not missing:
        return []
    more = f" and {len(missing) - FEW} more" if len(missing) > FEW else ""
    told = f"{', '.join(missing[:FEW])}{more}"
    return [f"the tokenizer has no id for {told}, which its settings name: left out"]


def add_known_template(tokenizer: Any, known: KnownTemplate | None) -> list[str]:
    """Set our known chat template where there is none; a sentence that says so."""
    if tokenizer.chat_template or known is None:
        return []
    tokenizer.chat_template = known.text
    return [f"the checkpoint has no chat template: using the known one for {known.repo}"]


ROLES = ("bos_token", "eos_token", "unk_token")  # the others are written by nothing here


def refuse_beyond(
    tokenizer: Mapping[str, Any],
    used: Iterable[str],
    around: Iterable[int],
    rows: int,
    where: str,
) -> None:
    """Refuse a tokenizer.json whose vocabulary is larger than the model's embeddings, or that has
    an added token beyond them which is in one of the texts `used`, or an id which it puts `around`
    every text.

    Others may be there: one vocabulary serves Gemma 3 with pictures and without, and the model
    without them has no embedding for their token. Raises ModelError, in one line.
    """
    text, largest = max(_vocabulary(tokenizer), key=lambda pair: pair[1], default=("", -1))
    if largest >= rows:
        raise _refusal(repr(text[:40]), largest, rows, where)
    if (largest := max(around, default=-1)) >= rows:
        raise _refusal("a token around every text", largest, rows, where)
    whole = "\n".join(used)
    for text, number in added_beyond(tokenizer, rows).items():
        if text in whole:
            raise _refusal(repr(text[:40]), number, rows, where)


def used_texts(settings: Mapping[str, Any]) -> Iterator[str]:
    """The texts that the settings of a tokenizer put into prompts: special tokens, templates."""
    yield from (token_text(settings.get(role)) for role in ROLES)
    template = settings.get("chat_template")
    named = template.values() if isinstance(template, dict) else [template]
    listed = [one.get("template") for one in _objects(template)]
    yield from (text for text in [*named, *listed] if isinstance(text, str))


def token_text(value: object) -> str:
    """The text of a special token, given as text or as an object with its content; else ""."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def added_beyond(tokenizer: Mapping[str, Any], rows: int) -> dict[str, int]:
    """The added tokens of a tokenizer.json without an embedding, with their ids."""
    added = _objects(tokenizer.get("added_tokens"))
    return {
        str(one.get("content")): one["id"]
        for one in added
        if type(one.get("id")) is int and one["id"] >= rows
    }


def without_beyond(tokenizer: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The tokenizer.json without these tokens: their text is ordinary text."""
    kept = [one for one in tokenizer["added_tokens"] if one["id"] < rows]
    return {**tokenizer, "added_tokens": kept}


def _objects(values: object) -> list[dict[str, Any]]:
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []


def _vocabulary(tokenizer: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    model = tokenizer.get("model")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(tokens, dict):
        yield from ((text, number) for text, number in tokens.items() if type(number) is int)
    elif isinstance(tokens, list) and tokens:  # [text, score], by their ids
        last = tokens[-1]
        yield str(last[0] if isinstance(last, list) and last else last), len(tokens) - 1


def _refusal(what: str, number: int, rows: int, where: str) -> ModelError:
    return ModelError(
        f"{where} gives {what} the id {number}, and the model has embeddings for {rows} "
        "tokens: take the tokenizer that belongs to the model"
    )
