"""Fixtures of the tests of this room."""

from support.hub_files import server  # noqa: F401
