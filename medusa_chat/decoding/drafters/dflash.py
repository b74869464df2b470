"""DFlash: drafts a tree from one pass of a DFlash drafter over a block of masked tokens.

The pass gives a distribution for each depth, whatever is drafted before it; with DSpark's term for
neighbours each depends on the token before, too.
"""

import torch
from torch import Tensor

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.beam import Beam, all_levels
from medusa_chat.decoding.drafters.dflash_model import DFlashModel
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.drafters.grown import Growth
from medusa_chat.decoding.drafters.own_layers import Names
from medusa_chat.decoding.drafters.recorded_draft import RecordedDraft
from medusa_chat.decoding.graph_capture import bucket_of
from medusa_chat.decoding.tree import ROOT


class DFlash:
    """A Drafter that reads states. vocabulary: tokens of the backbone that may be drafted."""

    kind, reads_states = kinds.DFLASH, True

    def __init__(self, model: DFlashModel, capacity: int, vocabulary: int) -> None:
        """capacity: tokens of the backbone's context."""
        self.model, self.taps = model, model.form.taps
        self._cache = model.cache(capacity + model.form.block)
        names = Names(model.ids, model.vocabulary, vocabulary, model.device)
        self._growth = Growth(names, model.form.deepest, is_paid=False)
        # for recorded drafts: the root, and the number of tokens in the cache
        self._given = torch.zeros(2, dtype=torch.long, device=model.device)
        self.recorded = RecordedDraft(model.device) if model.device.type == "cuda" else None
        self._scores = torch.empty(0)  # of the last pass, a row for each depth

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
        if not self._cache.length or depth < 1 or allowance.nodes < 2:
            return Candidates(ROOT, [root], [torch.nan], 0.0)
        growth, cache = self._growth, self._cache
        if self.recorded is None:
            self._read(self.model(root, cache))
            beam = Beam.of_root(torch.tensor([root], device=self.model.device))
            return growth.tree(depth, allowance, root, beam, self._level)
        self._given.copy_(torch.tensor([root, cache.length]))
        bucket = bucket_of(cache.length + self.model.form.block, cache.capacity)
        levels = growth.levels(allowance)
        words = self.recorded.run((levels, bucket), lambda: self._levels(levels, bucket))
        return growth.folded(depth, allowance, root, words)

    def _levels(self, levels: int, bucket: int) -> Tensor:
        """The words of a draft (`all_levels`), without waiting for the device. bucket: positions of
        the cache that are read."""
        root, length = self._given[:1], self._given[1:]
        self._read(self.model.behind(root, length, self._cache, bucket))
        return all_levels(Beam.of_root(root), levels, self._level, self._growth.names)

    def _read(self, rows: Tensor) -> None:
        """Keep the scores of a pass [block, w]."""
        form = self.model.form
        scores = self.model.scores(rows[form.block - form.deepest :])
        self._scores = scores if self.model.markov is not None else scores.log_softmax(-1)

    def _level(self, beam: Beam, level: int) -> tuple[Tensor, None]:
        """See beam.Read."""
        scores = self._scores[level : level + 1]
        if self.model.markov is None:
            return scores, None
        return (scores + self.model.markov(beam.tokens)).log_softmax(-1), None
