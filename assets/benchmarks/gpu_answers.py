"""Answers of gpu.py's models to token ids."""

from collections.abc import Sequence
from typing import Any

from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree


def prompt_of(engine: Engine, length: int) -> list[int]:
    """A made-up prompt."""
    return [(7 * i + 3) % engine.backbone.vocabulary for i in range(length)]


def events_of(
    engine: Engine,
    ids: Sequence[int],
    tree: Tree,
    count: int,
    temperature: float = 0.0,
    drafter: str = "medusa",
) -> list[Any]:
    """The events of an answer of at most `count` tokens, with the details that users get. A tree of
    one node is plain decoding."""
    name = drafter if len(tree) > 1 else "none"
    chosen = {"temperature": temperature, "max_new_tokens": count, "seed": 0}
    settings = GenerationSettings(name, nodes=len(tree), **chosen)
    return list(engine.generate(ids, engine.drafter(settings, tree), settings))
