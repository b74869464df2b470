"""The model, loaded once for all tests of a precision."""

from support.smollm2 import unpacked, model, place, real_gguf  # noqa: F401
