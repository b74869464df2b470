"""Usual context: how many tokens a load gives a model where nobody says, from its config alone."""

from collections.abc import Mapping
from typing import Any

LONGEST = 8192
LONGROPE = ("longrope", "su")  # the second in old files


def usual_context(limit: int, config: Mapping[str, Any]) -> int:
    """The tokens of a text model that can read `limit`: so many up to LONGEST, of longrope those of
    its short factors. config: of a file, or of transformers."""
    return min(limit, LONGEST, short_length(config) or limit)


def short_length(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest context for which a model's longrope has its short factors; None for a
    model without."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    own = config.get("original_max_position_embeddings")  # which transformers reads first
    lengths = [
        own or part.get("original_max_position_embeddings")
        for part in kinds
        if (part.get("rope_type") or part.get("type")) in LONGROPE
    ]
    return min((one for one in lengths if type(one) is int and one > 0), default=None)
