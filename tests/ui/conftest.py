"""What the tests of conversations start from, and what a browser is told."""

from collections.abc import Iterator

import pytest
from support.conversations import chat, controller  # noqa: F401

from medusa_chat.ui.access.notices import NOTICES, Told


@pytest.fixture
def told() -> Iterator[Told]:
    """What the browser is told whose events a test sends: [level, text, seconds] each."""
    begun = NOTICES.set(made := [])
    yield made
    NOTICES.reset(begun)
