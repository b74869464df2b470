"""The model, loaded once for all tests of a precision."""

from support.smollm2 import model, place, real_gguf, unpacked  # noqa: F401
