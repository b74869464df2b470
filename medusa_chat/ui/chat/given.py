"""given(): what the page's scripts know from the start, of the page and of a file saved from it."""

from typing import Any

from medusa_chat.ui.chat.markup import RULES
from medusa_chat.ui.page.pace import gpu_times


def given() -> dict[str, Any]:
    """By name: times of a step on named GPUs, and the rules by which text is no HTML."""
    return {"GPU_TIMES": gpu_times(), "RULES": RULES}
