"""Worker: holds the model of a process and does what is asked of it. Imports torch."""

from collections.abc import Callable, Iterator
from typing import Any

from medusa_chat.messages import LoadRequest, PeekRequest, Request
from medusa_chat.runtime.model_slot import ModelSlot
from medusa_chat.runtime.peek import peek
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import MeasureMemory, Reply, Tune, UseTree
from medusa_chat.runtime.tuner import tune_unless_known, use_tree


class Worker:
    """The model of a process. The one place where a request becomes a call."""

    def __init__(self) -> None:
        self.slot = ModelSlot()

    def handle(
        self, request: Request[Any], should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Any]:
        """What a request brings, value by value. should_stop is asked between values; closing the
        iterator stops at once. Raises MedusaChatError for what is refused."""
        slot = self.slot
        match request:
            case LoadRequest():
                yield from slot.load(request, should_stop)
            case Reply():
                yield from reply(slot.require(), request, should_stop)
            case PeekRequest():
                yield peek(slot.require(), request)
            case Tune(again):
                yield from tune_unless_known(slot.require(), should_stop, again)
            case UseTree(tree):
                yield use_tree(slot.require(), tree)
            case MeasureMemory(device):
                yield slot.measure_memory(device)
            case _:
                raise TypeError(f"a worker cannot handle {type(request).__name__}")
