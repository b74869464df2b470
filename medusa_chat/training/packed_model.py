"""PackedModel: a GGUF file as the frozen backbone of a training on a CPU, as decoding reads it.

Medusa-1 changes no weight of the backbone, so that the C pass gives its answers and its hidden
states from the file's own numbers. Only the LM head, which the gradients of the heads pass through,
is unpacked.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.checkpoints.devices import has_fast_bf16, torch_threads
from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.backends.native_step import NativeStep
from medusa_chat.decoding.backends.native_weights import NativeLinear
from medusa_chat.decoding.engine import Engine
from medusa_chat.errors import OutOfMemoryError
from medusa_chat.messages import LoadRequest

KEPT_BYTES = 2_000_000_000  # of hidden states of answers, at most


class KeptStates:
    """Hidden states of answers, kept while these were decoded, until they are taken: a second pass
    over the texts takes as long as the answers did. What is over KEPT_BYTES is not kept."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, ...], Tensor] = {}
        self._bytes = 0

    def put(self, prompt: tuple[int, ...], answer: tuple[int, ...], states: Tensor) -> None:
        """states [n, d]: those before each of the n tokens of an answer."""
        if self._bytes + states.nbytes <= KEPT_BYTES:
            self._bytes += states.nbytes
            self._states[prompt + answer] = states

    def take(self, padded: Tensor) -> Tensor | None:
        """Of a text, int64 [t] with zeros behind it: [t, d], 0 where no token of the answer
        follows; None where its answer's states are not there."""
        ids = padded.tolist()
        while tuple(ids) not in self._states:
            if not ids or ids.pop():
                return None
        states = self._states.pop(tuple(ids))
        self._bytes -= states.nbytes
        found = states.new_zeros(len(padded), states.shape[1])
        start = len(ids) - len(states) - 1
        found[start : start + len(states)] = states
        return found


class PackedModel(nn.Module):
    """Stands where a stock model of transformers does while heads are trained. dtype: of the hidden
    states; step: the C pass over one text, which NativeAnswerer makes many of; kept: states of its
    answers."""

    dtype, device = torch.bfloat16, torch.device("cpu")

    def __init__(self, engine: Engine, step: NativeStep, head: NativeLinear) -> None:
        super().__init__()
        self.engine, self.step, self.kept = engine, step, KeptStates()
        self.stock: Any = engine.backbone.model
        self.config = self.stock.config
        self.generation_config = self.stock.generation_config
        dtype = torch.bfloat16 if has_fast_bf16() else torch.float32
        self.head = nn.Linear(head.ins, head.outs, head.bias is not None, dtype=dtype)
        with torch.no_grad():
            rows = self.head.weight.split(1024)
            for places, some in zip(torch.arange(head.outs).split(1024), rows, strict=True):
                some.copy_(head.rows(places))
            if head.bias is not None:
                self.head.bias.copy_(head.bias)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.stock.get_input_embeddings()
        return found

    def get_decoder(self) -> Callable[..., SimpleNamespace]:
        """Called as a stock decoder is without a cache: input_ids int64 [b, t], padded with zeros
        behind -> last_hidden_state [b, t, d]."""
        return self._decode

    def _decode(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        rows = [self._states(ids) for ids in input_ids]
        return SimpleNamespace(last_hidden_state=torch.stack(rows))

    def _states(self, ids: Tensor) -> Tensor:
        kept = self.kept.take(ids)
        if kept is not None:
            return kept
        with torch_threads(1):  # C's own do the work
            return states_of(self.engine, ids).to(self.dtype)


def read_packed(file: Path, context: int) -> PackedModel | None:
    """A GGUF file for texts of at most `context` tokens; None where the C pass does not decode it.
    Raises as `load` does, with train's name of the context."""
    threads = torch.get_num_threads()
    try:
        *_, (_, loaded) = load(LoadRequest(str(file), device="cpu", max_context=context))
    except OutOfMemoryError as error:
        line = str(error).replace("--max-context", "--sequence-length")
        raise OutOfMemoryError(line) from error
    torch.set_num_threads(threads)  # the load leaves one where no product of a step is torch's
    assert loaded is not None
    step, head = loaded.engine.backend, loaded.engine.backbone.model.get_output_embeddings()
    if not isinstance(step, NativeStep) or not isinstance(head, NativeLinear):
        return None
    return PackedModel(loaded.engine, step, head)


@torch.inference_mode()
def states_of(engine: Engine, ids: Tensor) -> Tensor:
    """ids [n] int64 -> hidden states [n, d] of the engine's backbone. Empties its cache."""
    engine.forget()
    parts = ids.split(engine.backbone.chunk)
    hidden = torch.cat([engine.backbone.run_chunk(part) for part in parts])
    engine.forget()
    return hidden


def for_loss(model: Any, hidden: Tensor) -> Tensor:
    """hidden [n, d] of a backbone in the dtype that its heads are trained in."""
    return hidden.to(model.head.weight.dtype) if isinstance(model, PackedModel) else hidden
