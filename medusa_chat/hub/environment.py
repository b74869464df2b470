"""What huggingface_hub is set to: endpoint, folders, timeouts, offline.

It reads the environment when it is imported, and --offline and --data-dir write there first: so no
module of this room imports it at its top.
"""

import os
from typing import Any

ANSWER_SECONDS = 4.0  # how long a small question may take: connecting, and each silence after


def constants() -> Any:
    """huggingface_hub's constants: endpoint, folders, offline; read from the environment once."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # nothing is told, nor waited for
    from huggingface_hub import constants as values
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # what goes wrong is said once, by us
    return values


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE (or --offline, which sets it) forbids the network."""
    return bool(constants().HF_HUB_OFFLINE)


def answer_seconds() -> float:
    """How long a small question may take; HF_HUB_ETAG_TIMEOUT, huggingface_hub's own variable for
    that, overrides it."""
    chosen = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(chosen) if chosen.isdecimal() and int(chosen) else ANSWER_SECONDS


def page(repo: str) -> str:
    """The repo's page in the browser."""
    return f"{constants().ENDPOINT}/{repo}"
