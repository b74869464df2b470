"""RecordedDraft: all levels of a draft as one CUDA graph, read by the host in one copy."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from medusa_chat.decoding.graph_capture import GraphCapture, said_of

ASKED = 3  # drafts of a kind before it is recorded


class RecordedDraft:
    """Drafts whose body never waits for the device and has fixed shapes: on CUDA a graph for each
    kind of them, elsewhere the body is called."""

    def __init__(self, device: torch.device) -> None:
        self._capture = GraphCapture(device)
        self._asked = Counter[Hashable]()
        self._made: dict[Hashable, Callable[[], None]] = {}
        self._words: dict[Hashable, Tensor] = {}
        self._is_over = False

    def run(self, kind: Hashable, body: Callable[[], Tensor]) -> list[float]:
        """The words float32 [w] that a body leaves on the device. kind: of the draft; bodies of one
        kind differ only in what lies in the tensors that they read."""
        self._asked[kind] += 1
        if self._asked[kind] >= ASKED and not self._is_over:
            try:
                return self._recorded(kind, body).tolist()
            except Exception as error:  # the device, a layer or the memory: operators can
                self._refuse(error)
        return body().tolist()

    def _recorded(self, kind: Hashable, body: Callable[[], Tensor]) -> Tensor:
        def run() -> None:
            self._words[kind] = body()

        if kind not in self._made:
            self._made[kind] = self._capture.recorded(run)
        self._made[kind]()
        return self._words[kind]

    def _refuse(self, error: Exception) -> None:
        """Run by operators from now on."""
        self._is_over = True
        self._made.clear()
        self._words.clear()
        self._capture.recover()
        log = logging.getLogger(__name__)
        log.warning("drafts run by torch operators, not as CUDA graphs: %s", said_of(error))
