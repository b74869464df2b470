"""A Hub of their own for these tests."""

from support.hub_files import server  # noqa: F401
