"""Sampling defaults: temperature, top-p and the like that a model's own files name."""

from collections.abc import Mapping
from typing import Any

from medusa_chat.decoding.settings import SAMPLING, GenerationSettings, sampling_words
from medusa_chat.errors import UsageError

OF_GGUF = {  # keys of a GGUF file -> of a generation config
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def gguf_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a GGUF file's header says of sampling, by the names of a generation config. Its numbers
    are float32: 0.8 is read as 0.8."""
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for key, name in OF_GGUF.items()
        if isinstance(value := metadata.get(key), int | float)
    }


def sampling_defaults(generation: Any) -> tuple[dict[str, float], list[str]]:
    """(the defaults that a generation config names, notes on them): values as GenerationSettings
    takes them; others are left out, and named in a note."""
    found: dict[str, float] = {}
    notes = []
    for name in SAMPLING:
        value = getattr(generation, name, None)
        if value is None:
            continue
        try:
            GenerationSettings(**{name: value})
        except UsageError as error:
            notes.append(f"not applied, of generation_config.json: {error}")
        else:
            found[name] = value
    if found:
        notes.insert(0, f"model's defaults: {sampling_words(found)}")
    return found, notes
