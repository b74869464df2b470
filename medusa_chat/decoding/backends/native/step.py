"""NativeStep: TorchStep whose pass is one call into C."""

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.native.decoder import NativeDecoder
from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.rows import NativeRows
from medusa_chat.decoding.backends.torch_step import TorchStep
from medusa_chat.decoding.drafters import Draft


class NativeStep(TorchStep):
    """A StepBackend for a backbone whose decoder and LM head are native."""

    def __init__(self, backbone: Backbone, decoder: NativeDecoder, team: NativeThreads) -> None:
        super().__init__(backbone)
        self.rows: NativeRows = NativeRows(team)
        self.name = f"the pass in C, by {team.threads} threads"
        self.decoder, self._window = decoder, backbone.windows[0]

    def run(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """The backbone's pass: see torch_step.Pass. The text before the tree needs no mask, unless
        it is longer than the attention window."""
        start, depth = self.backbone.cache.length, draft.tree.depth
        if self._window is not None and start + depth >= self._window:
            return super().run(draft)
        ancestors = draft.tensors.ancestors
        mask = torch.zeros(ancestors.shape).masked_fill_(ancestors.logical_not(), -torch.inf)
        places = draft.tensors.depths + start
        hidden = self.decoder.run_rows(draft.tokens, places, mask, start, start)
        return hidden, self.backbone.lm_head(hidden)
