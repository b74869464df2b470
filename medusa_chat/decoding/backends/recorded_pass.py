"""RecordedPasses: a TorchStep whose passes are CUDA graphs, for any tree.

The tokens, the tree's mask and the length of the text are data of a recording, so that one serves
all trees with as many nodes: those of a drafter that runs on the host between two steps, and steps
whose logits or states are read.
"""

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from medusa_chat.decoding.attention import BITS, FIXED, NodeMask, additive, sights
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.draft import Draft, Plan
from medusa_chat.decoding.graph_capture import GraphCapture, bucket_of, said_of
from medusa_chat.decoding.step import DecodeState, StepResult, TorchStep

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of the recordings; a tree's are padded to the next
ASKED = 3  # passes of a size before it is recorded

Key = tuple[int, int, bool]  # rows, positions that are read, whether the backbone is tapped


class RecordedPass:
    """A pass of so many rows behind any text that fits `bucket` with them. hidden [rows, d], logits
    [rows, V], taps [rows, k, d] or None: of the last run. `body` never waits for the device."""

    hidden: Tensor
    logits: Tensor
    taps: Tensor | None

    def __init__(self, capture: GraphCapture, backbone: Backbone, rows: int, bucket: int) -> None:
        self._backbone, device = backbone, backbone.device
        self._tokens, self._positions = torch.zeros(2, rows, dtype=torch.long, device=device)
        self._places = torch.arange(rows, device=device)
        self._order = self._places.clone()
        shape = rows, FIXED - -rows // BITS
        self._words = {
            window: torch.zeros(shape, dtype=torch.long, device=device)
            for window in backbone.windows
        }
        self._columns = torch.arange(bucket, device=device)
        self._layers = backbone.cache.fixed(self._places, bucket)
        self._capture = capture
        self._replay: Callable[[], None] | None = None

    def run(self, draft: Draft, length: int) -> None:
        """The pass over a draft's nodes behind `length` tokens. Rows beyond them repeat the
        root."""
        tensors, count = draft.tensors, len(draft.tree)
        for own, given in ((self._tokens, draft.tokens), (self._positions, tensors.depths)):
            own[:count] = given
            own[count:] = given[0]
        self._positions += length
        torch.add(self._order, length, out=self._places)
        for window, words in self._words.items():
            given = NodeMask.of(tensors, window).behind(length)
            words.zero_()
            words[:count, : given.shape[1]] = given
            words[count:] = words[0]
        if self._replay is None:
            self._replay = self._capture.recorded(self.body)
        self._replay()

    def body(self) -> None:
        """Queue the pass, without waiting."""
        backbone, masks = self._backbone, self._words
        if not backbone.takes_words:
            masks = {
                window: additive(
                    words, sights(words), self._columns, backbone.dtype, window is not None
                )
                for window, words in masks.items()
            }
        self.hidden = backbone.run_fixed(self._tokens, self._positions, masks, self._layers)
        self.logits = backbone.lm_head(self.hidden)
        self.taps = backbone.tapped if backbone.is_tapped else None


class RecordedPasses(TorchStep):
    """Passes of each number of rows are recorded once they were asked for a few times. What cannot
    be recorded runs by operators, and the log says so."""

    name = "torch operators, each pass one CUDA graph"

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self._capture: GraphCapture | None = None
        self._asked = Counter[int]()
        self._made: dict[Key, RecordedPass] = {}
        self._last: RecordedPass | None = None
        self._is_over, self.seconds = False, 0.0  # seconds: of steps whose pass was recorded

    @torch.inference_mode()
    def step(self, state: DecodeState, plan: Plan) -> StepResult:
        """See StepBackend."""
        result = super().step(state, plan)
        if self._last is not None:
            self.seconds += result.backbone_seconds
        return result

    def run(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """See TorchStep. The results are overwritten by the next run of as many rows."""
        self._last, count = None, len(draft.tree)
        rows = next((size for size in ROWS if size >= count), 0)
        self._asked[rows] += 1
        if rows and self._asked[rows] >= ASKED and not self._is_over:
            try:
                return self._recorded(draft, rows)
            except Exception as error:  # the device, a layer or the memory: operators can
                self._refuse(error)
        return super().run(draft)

    def _recorded(self, draft: Draft, rows: int) -> tuple[Tensor, Tensor]:
        backbone, count = self.backbone, len(draft.tree)
        cache = backbone.cache
        bucket = cache.capacity
        if not backbone.takes_words:
            bucket = bucket_of(cache.length + rows, cache.capacity)
        key = rows, bucket, backbone.is_tapped
        made = self._made.get(key)
        if made is None:
            self._capture = self._capture or GraphCapture(backbone.device)
            made = RecordedPass(self._capture, backbone, rows, bucket)
        made.run(draft, cache.length)
        self._made[key] = self._last = made
        # a step keeps its last state beyond the next one
        return made.hidden[:count].clone(), made.logits[:count]

    @property
    def tapped(self) -> Tensor:
        """See TorchStep."""
        if self._last is None or self._last.taps is None:
            return super().tapped
        return self._last.taps

    def stop(self) -> None:
        """Record nothing any more, and free what is recorded: operators may need the memory."""
        self._is_over, self._last = True, None
        self._made.clear()

    def _refuse(self, error: Exception) -> None:
        self.stop()
        if self._capture is not None:
            self._capture.recover()
        if self.backbone.device.type == "cuda":
            torch.cuda.empty_cache()
        log = logging.getLogger(__name__)
        told = error if log.isEnabledFor(logging.DEBUG) else None
        said = said_of(error)
        log.warning("passes run by torch operators, not as CUDA graphs: %s", said, exc_info=told)
