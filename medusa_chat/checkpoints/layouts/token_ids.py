"""Token ids for which a model has no embedding: which a tokenizer.json gives, and which matter."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from medusa_chat.errors import ModelError

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
    """What the settings of a tokenizer have written into prompts: special tokens, templates."""
    yield from (token_text(settings.get(role)) for role in ROLES)
    template = settings.get("chat_template")
    named = template.values() if isinstance(template, dict) else [template]
    listed = [one.get("template") for one in _objects(template)]
    yield from (text for text in [*named, *listed] if isinstance(text, str))


def token_text(value: object) -> str:
    """The text of a special token, which is one or an object with its content; "" for others."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def added_beyond(tokenizer: Mapping[str, Any], rows: int) -> dict[str, int]:
    """The added tokens of a tokenizer.json for which there is no embedding, with their ids."""
    added = _objects(tokenizer.get("added_tokens"))
    return {
        str(one.get("content")): one["id"]
        for one in added
        if type(one.get("id")) is int and one["id"] >= rows
    }


def without_beyond(tokenizer: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The tokenizer.json without them: their text is text as any other."""
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
