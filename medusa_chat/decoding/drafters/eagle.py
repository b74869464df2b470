"""Eagle: the drafter of EAGLE-1, EAGLE-3 and 3.1, a tree grown level by level.

A row of it is a state of the backbone and the token after it. The rows of the text are kept in a
cache of its own; drafted nodes have their parent's output for a state, and are forgotten after the
draft.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.beam import Beam, all_levels, tree_mask
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.drafters.eagle_model import EagleModel
from medusa_chat.decoding.drafters.grown import Growth
from medusa_chat.decoding.drafters.own_layers import WIDTH, Fixed, Names
from medusa_chat.decoding.drafters.recorded_draft import RecordedDraft
from medusa_chat.decoding.graph_capture import bucket_of
from medusa_chat.decoding.kv_cache import KVCache
from medusa_chat.decoding.tree import ROOT

DEEPEST = 8  # levels of a draft
ROWS = 16  # of the text that a recorded draft reads first: more are read before it
FEW = 256  # rows of the text that wait for the next draft: with more, they are read at once
ROW = 0.1  # of a pass: what a row costs in a pass of many


class Eagle:
    """A Drafter that reads states. vocabulary: tokens of the backbone that may be drafted."""

    kind, reads_states = kinds.EAGLE, True

    def __init__(self, model: EagleModel, capacity: int, vocabulary: int) -> None:
        """capacity: tokens of the backbone's context."""
        self.model, self._capacity = model, capacity
        self.taps = model.form.taps
        self._cache = model.cache(capacity + ROWS + DEEPEST * WIDTH)
        shape = capacity, model.width
        self._states = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._ids: list[int] = []  # the text; _states[i] is what the backbone had at token i
        self._root: int | None = None  # the token behind the text whose row is in the cache
        names = Names(model.ids, model.vocabulary, vocabulary, model.device)
        self._growth = Growth(names, DEEPEST)
        # for recorded drafts: the first row that is read, how many more are, tokens behind them
        self._given = torch.zeros(2 + ROWS, dtype=torch.long, device=model.device)
        self.recorded = RecordedDraft(model.device) if model.device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes of its cache and of the states that it keeps."""
        return self._cache.nbytes + self._states.nbytes

    @property
    def length(self) -> int:
        """See Drafter."""
        return len(self._ids)

    def crop(self, length: int) -> None:
        """See Drafter."""
        if length < len(self._ids):
            del self._ids[length:]
            self._drop_root()

    def _drop_root(self) -> None:
        """Keep the rows of the text alone: each needs the token after it."""
        self._root = None
        self._cache.crop(min(self._cache.length, max(len(self._ids) - 1, 0)))

    @torch.inference_mode()
    def observe(self, features: Features) -> None:
        """See Drafter."""
        assert features.final is not None
        if features.tokens and features.tokens[0] != self._root:
            self._drop_root()
        start, count = len(self._ids), len(features.tokens)
        self._states[start : start + count] = self.model.fused(features.final, features.taps)
        self._ids += features.tokens
        self._root = None
        if len(self._ids) - self._cache.length > FEW:
            self._read(len(self._ids) - 1, self._ids)

    @torch.inference_mode()
    def draft(self, root: int, depth: int, allowance: Allowance) -> Candidates:
        """See Drafter."""
        if not self._ids or depth < 1 or allowance.nodes < 2:
            return Candidates(ROOT, [root], [torch.nan], 0.0)
        if self._root != root:
            self._drop_root()
        passes = 1 + ROW * (len(self._ids) - self._cache.length)
        if self.recorded is not None:
            words = self._read_at_once(self.recorded, root, self._growth.levels(allowance))
            return self._growth.folded(depth, allowance, root, words, passes)
        beam = Beam.of_root(torch.tensor([root], device=self.model.device))
        return self._growth.tree(depth, allowance, root, beam, self._level, passes)

    def _read_at_once(self, recorded: RecordedDraft, root: int, levels: int) -> list[float]:
        """All levels of a draft, by passes of fixed shapes."""
        length, cache = len(self._ids), self._cache
        if length - cache.length > ROWS:
            self._read(length - ROWS, self._ids)
        start = min(cache.length, length - 1)  # the last row again, for its output
        tokens = [*self._ids[start + 1 :], root]
        given = [start, len(tokens) - 1, *tokens, *[0] * (ROWS - len(tokens))]
        self._given.copy_(torch.tensor(given))
        bucket = bucket_of(length + ROWS + DEEPEST * WIDTH, cache.capacity)
        words = recorded.run((levels, bucket), lambda: self._levels(levels, bucket))
        cache.length, self._root = length, root
        return words

    def _levels(self, levels: int, bucket: int) -> Tensor:
        """The words of a draft (`all_levels`), without waiting for the device. bucket: positions of
        the cache that are read."""
        start, last, tokens = self._given[:1], self._given[1:2], self._given[2:]
        text = start + last + 1
        columns = torch.arange(bucket, device=text.device)

        def read(beam: Beam, level: int) -> tuple[Tensor, Tensor]:
            if level:
                before = beam.seen.shape[1] - len(beam.tokens)
                rows = torch.arange(before, beam.seen.shape[1], device=text.device)
                cache = Fixed(self._cache, text + rows, bucket)
                scores, states = self._drafted(beam, level, text, columns, cache)
                return scores, states
            places = start + torch.arange(ROWS, device=text.device)
            cache = Fixed(self._cache, places, bucket)
            states, scores = self._text_rows(places, tokens, columns, cache)
            return scores.index_select(0, last), states.index_select(0, last)

        root = Beam.of_root(tokens.index_select(0, last))
        return all_levels(root, levels, read, self._growth.names)

    def _level(self, beam: Beam, level: int) -> tuple[Tensor, Tensor]:
        """See beam.Read. The keys and values of drafted nodes stay behind the text's until the
        draft is made."""
        if not level:
            root = int(beam.tokens)
            states, scores = self._read(len(self._ids), [*self._ids, root])
            self._root = root
            return scores, states
        text, count = self._cache.length, beam.seen.shape[1]
        self._cache.length = text + count - len(beam.tokens)
        columns = torch.arange(text + count, device=self.model.device)
        found = self._drafted(beam, level, text, columns, self._cache)
        self._cache.length = text
        return found

    def _drafted(
        self,
        beam: Beam,
        level: int,
        text: Tensor | int,
        columns: Tensor,
        cache: KVCache | Fixed,
    ) -> tuple[Tensor, Tensor]:
        """Read the nodes of a level behind `text` rows -> their log probabilities and outputs.
        columns int64 [s]: the places of the cache that they read."""
        assert beam.states is not None
        mask = tree_mask(beam.seen, columns - text, self.model.dtype)
        places = torch.zeros_like(beam.tokens) + (text - 1 + level)
        states, scores = self.model(beam.states, beam.tokens, places, mask, cache)
        return scores, states

    def _text_rows(
        self, places: Tensor, tokens: Tensor, columns: Tensor, cache: KVCache | Fixed
    ) -> tuple[Tensor, Tensor]:
        """Read rows of the text at `places` int64 [n], each with the token after it -> outputs
        [n, w] and log probabilities [n, V_d]."""
        states = self._states.index_select(0, places.clamp(max=len(self._states) - 1))
        mask = torch.zeros(len(places), len(columns), dtype=self.model.dtype, device=places.device)
        mask.masked_fill_(columns > places[:, None], -torch.inf)
        out: tuple[Tensor, Tensor] = self.model(states, tokens, places, mask, cache)
        return out

    def _read(self, length: int, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read the rows up to `length` into the cache: the state at each place, and the token after
        it -> the last row's output [1, w] and log probabilities [1, V_d]."""
        start, device = self._cache.length, self.model.device
        if start == length:  # the last row again, for its output
            start = self._cache.length = length - 1
        out, scores = self._states[:0], self._states[:0]
        while start < length:
            end = min(start + FEW, length)
            given = torch.tensor(tokens[start + 1 : end + 1], device=device)
            columns = torch.arange(end, device=device)
            out, scores = self._text_rows(columns[start:], given, columns, self._cache)
            self._cache.extend(end - start)
            start = end
        return out[-1:], scores[-1:]
