"""NativeRows: what a rule reads from rows of logits, in C (kernels/rows.c, kernels/draw.c)."""

import math
from ctypes import addressof, byref, c_char

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Position, Rows, VerifyInput, filtered, scaled
from medusa_chat.decoding.backends import native_library as structs
from medusa_chat.decoding.backends.native_library import NativeLibrary

FEW = 2**16  # numbers that one thread reads as fast as several that wait for each other


class NativeRows(Rows):
    """Rows in C. Samples are torch's: where rounding might have it otherwise (a near tie, the end
    of top-p), torch draws (test_native_rows.py compares them). Sums are torch's to rounding.

    No operator of torch reads a whole row here: its threads go on spinning after one, on the cores
    that the next pass wants."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library, self._work = library, torch.empty(0)

    def largest(self, scores: Tensor) -> Tensor:
        """Rows.largest: scores [n, V] of any floating dtype -> int64 [n]."""
        return self._drawn(scores, structs.Draw(scale=1.0))[0]

    def sample(self, given: VerifyInput) -> Tensor:
        """Rows.sample: int64 [n]."""
        logits, settings = given.logits, given.settings
        depths, _, place, seed = given.noise
        if not isinstance(place, int) or not isinstance(seed, int):
            return super().sample(given)
        job = structs.Draw(None, depths.data_ptr(), seed=seed, place=place, top_k=settings.top_k)
        job.scale, job.top_p = settings.scale, settings.top_p
        job.min_p = math.log(settings.min_p) if settings.min_p > 0 else -math.inf
        tokens, unsure = self._drawn(logits, job)
        for row in unsure:
            left = filtered(scaled(logits[row : row + 1], settings), settings)
            at = place + int(depths[row])
            tokens[row] = super().draw(left, depths.new_zeros(1), 0, at, seed)[0]
        return tokens

    def draw(
        self, scores: Tensor, depths: Tensor, deepest: int, place: Position, seed: int | Tensor
    ) -> Tensor:
        """Rows.draw: scores [n, V] of any floating dtype, depths int64 [n] -> int64 [n]."""
        if not isinstance(place, int) or not isinstance(seed, int):
            return super().draw(scores, depths, deepest, place, seed)
        return self.draw_each(scores, place + depths, torch.full_like(depths, seed))

    def draw_each(self, scores: Tensor, places: Tensor, seeds: Tensor) -> Tensor:
        """`draw` of rows of different texts, scores [n, V]: row i by seed i at place i of its text,
        int64 [n] each -> tokens int64 [n]; the largest where the place is under 0."""
        addresses = places.data_ptr(), seeds.data_ptr()
        job = structs.Draw(None, None, *addresses, scale=1.0, top_p=1.0, min_p=-math.inf)
        tokens, unsure = self._drawn(scores, job)
        for row in unsure:
            one, place, seed = scores[row : row + 1], int(places[row]), int(seeds[row])
            tokens[row] = super().draw(one, places.new_zeros(1), 0, place, seed)[0]
        return tokens

    def _drawn(self, scores: Tensor, job: structs.Draw) -> tuple[Tensor, list[int]]:
        """The tokens int64 [n] by a job whose rows are scores [n, V], and of which rows they are
        unsure."""
        scores = scores.float().contiguous()
        rows, size = scores.shape
        threads = self._count(scores)
        needed = threads * self._library.c.draw_work(size)
        if self._work.numel() < needed:
            self._work = torch.empty(needed)
        tokens, unsure = torch.empty(rows, dtype=torch.long), bytearray(rows)
        job.scores, job.work, job.tokens = (t.data_ptr() for t in (scores, self._work, tokens))
        job.unsure = addressof(c_char.from_buffer(unsure))
        job.rows, job.size = rows, size
        self._library.c.draw(byref(job), threads)
        return tokens, [row for row in range(rows) if unsure[row]] if any(unsure) else []

    def sums(self, given: VerifyInput) -> tuple[Tensor, Tensor]:
        """Rows.sums: float32 [n] twice, to rounding."""
        logits = given.logits.float().contiguous()
        sums, entropies = (torch.empty(logits.shape[0]) for _ in range(2))
        addresses = (t.data_ptr() for t in (logits, sums, entropies))
        job = structs.Sums(*addresses, *logits.shape, given.settings.scale)
        self._library.c.row_sums(byref(job), self._count(logits))
        return sums, entropies

    def drafted(self, given: VerifyInput) -> Tensor:
        """Rows.drafted: float32 [n]."""
        draft = given.draft
        return scaled(given.logits[draft.tensors.parents, draft.tokens], given.settings)

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows.best: logits [n, V] of any floating dtype -> float32, int64 [n, count], float32 [n];
        the first of equals first."""
        logits = logits.float().contiguous()
        rows = len(logits)
        values, sums = torch.empty(rows, count), torch.empty(rows)
        places = torch.empty(rows, count, dtype=torch.long)
        addresses = (t.data_ptr() for t in (logits, values, sums, places))
        job = structs.Guesses(*addresses, *logits.shape, count)
        self._library.c.guesses(byref(job), self._count(logits))
        return values, places, sums

    def _count(self, scores: Tensor) -> int:
        """How many threads read scores [n, V], a row each."""
        return min(self._library.threads, len(scores)) if scores.numel() > FEW else 1
