"""Worker: holds the model of a process and does what is asked of it. Imports torch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.memory import refuse_out_of_memory
from medusa_chat.messages import LoadRequest, Peek, PeekRequest, Ranked, Request
from medusa_chat.runtime.model_slot import ModelSlot
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


def peek(loaded: LoadedModel, request: PeekRequest) -> Peek:
    """The most probable tokens after a text, from the backbone and from one of its heads."""
    with refuse_out_of_memory(lambda: "out of memory: try a shorter chat"):
        logits, drafted = loaded.engine.peek(request.token_ids, request.path, request.head)
    found = _ranked(loaded, logits, request.temperature or 1.0, request)
    at_head = ((), ()) if drafted is None else _ranked(loaded, drafted, 1.0, request)
    return Peek(found[0], at_head[0], found[1], at_head[1])


def _ranked(
    loaded: LoadedModel, logits: Tensor, temperature: float, request: PeekRequest
) -> tuple[tuple[Ranked, ...], tuple[Ranked, ...]]:
    """(the first `top`, the tokens asked for), with their probabilities."""
    shares = (logits.float() / temperature).softmax(-1).cpu()
    best = shares.topk(min(request.top, len(shares))).indices.tolist()

    def places(tokens: Sequence[int]) -> tuple[Ranked, ...]:
        return tuple(
            Ranked(t, loaded.texts(t), float(shares[t]), int((shares > shares[t]).sum()) + 1)
            for t in tokens
        )

    known = [token for token in request.tokens if 0 <= token < len(shares)]
    return places(best), places(known)
