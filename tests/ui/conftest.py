"""What the tests of conversations start from."""

from support.conversations import chat, controller  # noqa: F401
