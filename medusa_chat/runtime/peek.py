"""peek(): what the model and its heads would have said after a text."""

from collections.abc import Sequence

from torch import Tensor

from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.memory import refuse_out_of_memory
from medusa_chat.messages import Peek, PeekRequest, Ranked


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
