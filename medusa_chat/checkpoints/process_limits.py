"""Limits of a child process, and the environment it is started with. Imports no torch."""

import os
from pathlib import Path
from types import ModuleType

from medusa_chat import paths

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

MAPPED = Path("/proc/self/statm")


def can_limit_memory() -> bool:
    """Whether this system enforces a memory limit; macOS accepts one but does not enforce it."""
    return resource is not None and MAPPED.exists()


def limit_memory(more: int) -> None:
    """Limit this process to `more` bytes beyond what it has mapped now, if the system can."""
    if resource is not None and can_limit_memory():
        pages = int(MAPPED.read_text("ascii").split()[0])
        lower_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


def lower_limit(kind: int, value: int) -> None:
    """Lower a limit of this process for good."""
    assert resource is not None
    _, hard = resource.getrlimit(kind)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (most, most))


def environment() -> dict[str, str]:
    """Our environment, without variables that weaken torch's checks, and with this package."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_FORCE", "PYTHONSTART"))}
    folders = [str(paths.PACKAGE.parent), *kept.get("PYTHONPATH", "").split(os.pathsep)]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "OMP_NUM_THREADS": "1"}
