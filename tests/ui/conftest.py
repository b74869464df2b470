"""What the tests of conversations start from."""

from support.conversations import desk, room  # noqa: F401
