"""A worker process that loses its device once, in the middle of the answer that asks for it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_chat.runtime.runner import serve

TOKENS = 77  # the most new tokens of an answer that loses the device
MARK = "MEDUSA_CHAT_TEST_LOSES_DEVICE"  # names a file that the worker removes when it has lost it


def serve_until_lost(pipe: Any) -> None:
    """`serve` of the worker, in which the engine meets what torch raises for a lost device."""
    import torch

    from medusa_chat.decoding.engine import Engine

    generate = Engine.generate

    def failing(self: Engine, ids: Any, drafter: Any, settings: Any, **more: Any) -> Iterator[Any]:
        mark = Path(os.environ[MARK])
        for count, event in enumerate(generate(self, ids, drafter, settings, **more)):
            yield event
            if settings.max_new_tokens == TOKENS and count == 3 and mark.is_file():
                mark.unlink()
                raise torch.AcceleratorError("CUDA error: an illegal memory access")

    Engine.generate = failing  # type: ignore[method-assign]
    serve(pipe)
