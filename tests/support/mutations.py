"""Files of a checkpoint with one value or a few bytes changed at random."""

import json
import random
from collections.abc import Iterator
from typing import Any

ODD = (
    *(None, True, -1, 0, 7, 1.5, 10**30, float("nan"), 1e-30),
    *("x", "", [], [1], [None], {}, {"a": 1}),
)
FEW = 4  # entries of a list or an object that may be changed


def mutated(value: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A copy in which one value is gone or another."""
    copy = json.loads(json.dumps(value))
    holder, key = draw.choice(list(_places(copy)))
    if draw.random() < 0.25:
        del holder[key]
    else:
        holder[key] = draw.choice(ODD)
    return copy


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key) of the values; of the many of a vocabulary only some."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys if len(keys) < 100 else keys[:FEW]:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def spoiled(data: bytes, draw: random.Random) -> bytes:
    """With some bytes changed, most of them where a file begins."""
    copy = bytearray(data)
    for _ in range(draw.choice((1, 3))):
        copy[draw.randrange(min(len(copy), draw.choice((3000, len(copy)))))] = draw.randrange(256)
    return bytes(copy)
