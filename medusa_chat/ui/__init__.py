"""The page, and how Gradio is imported for it: it and huggingface_hub read these switches then."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from medusa_chat.ui.temporary_files import own_folder

for name, value in {
    # Its usual one may be another user's, and is shared with every other Gradio app.
    "GRADIO_TEMP_DIR": str(own_folder()),
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}.items():
    os.environ[name] = value
for name in ("GRADIO_SHARE", "GRADIO_ALLOWED_PATHS", "GRADIO_LOCAL_DEV_MODE", "GRADIO_DEBUG"):
    os.environ.pop(name, None)  # each would open the page wider than the command line said


@contextmanager
def no_stubs() -> Iterator[None]:
    """While Gradio is imported here it writes no stubs (.pyi) beside its files. For them it parses
    the source of every component, a fourth of its import and more; a class without a file has
    none."""
    real = inspect.getfile

    def getfile(object: Any) -> str:
        if str(getattr(object, "__module__", "")).startswith("gradio."):
            raise OSError("no stub is wanted")
        return real(object)

    inspect.getfile = getfile
    try:
        yield
    finally:
        inspect.getfile = real
