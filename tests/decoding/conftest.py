"""A quantised model on disk."""

from support.linear4 import folder  # noqa: F401
