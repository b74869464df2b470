"""DFlash: drafts a tree from one pass of a DFlash drafter over a block of masked tokens.

The pass gives a distribution for each depth, whatever is drafted before it; with DSpark's term for
neighbours each depends on the token before, too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.dflash_model import DFlashModel
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.drafters.grown import WIDTH, Best, Grown, Growth
from medusa_chat.decoding.drafters.own_layers import Names
from medusa_chat.decoding.tree import ROOT


class DFlash:
    """A Drafter that reads states. vocabulary: tokens of the backbone that may be drafted."""

    kind, reads_states = kinds.DFLASH, True

    def __init__(self, model: DFlashModel, capacity: int, vocabulary: int) -> None:
        """capacity: tokens of the backbone's context."""
        self.model, self.taps = model, model.form.taps
        self._cache = model.cache(capacity + model.form.block)
        self._growth = Growth(model.form.deepest, is_paid=False)
        self._names = Names(model.ids, model.vocabulary, vocabulary, model.device)
        self._logits = torch.empty(0)  # of the last pass, a row for each depth
        self._levels: Best = [], []  # their best tokens, where neighbours do not matter

    @property
    def nbytes(self) -> int:
        """Bytes of its cache."""
        return self._cache.nbytes

    @property
    def length(self) -> int:
        """See Drafter."""
        return self._cache.length

    def crop(self, length: int) -> None:
        """See Drafter."""
        self._cache.crop(min(length, self._cache.length))

    @torch.inference_mode()
    def observe(self, features: Features) -> None:
        """See Drafter."""
        assert features.taps is not None
        self.model.read(features.taps, self._cache)

    @torch.inference_mode()
    def draft(self, root: int, depth: int, allowance: Allowance) -> Candidates:
        """See Drafter."""
        if not self._cache.length:
            return Candidates(ROOT, [root], [torch.nan], 0.0)
        return self._growth.tree(root, depth, allowance, self._expand)

    def _expand(
        self, grown: Grown, frontier: Sequence[int], level: int
    ) -> tuple[*Best, Tensor | None]:
        """See grown.Expand. The first level makes the pass."""
        if not level:
            form = self.model.form
            rows = self.model(grown.tokens[0], self._cache)
            self._logits = self.model.scores(rows[form.block - form.deepest :])
            if self.model.markov is None:
                self._levels = self._names.best(self._logits.log_softmax(-1), WIDTH)
        if self.model.markov is None:
            tokens, shares = self._levels
            count = len(frontier)
            return [tokens[level]] * count, [shares[level]] * count, None
        before = [grown.tokens[node] for node in frontier]
        more = self.model.markov(torch.tensor(before, device=self.model.device))
        scores = (self._logits[level] + more).log_softmax(-1)
        return *self._names.best(scores, WIDTH), None
