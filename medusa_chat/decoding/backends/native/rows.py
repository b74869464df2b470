"""NativeRows: what is dear in torch of reading logits on a CPU, by the C library."""

from ctypes import byref

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Position, Rows
from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.structs import Draw, Sums

FEW = 2**16  # numbers that one thread reads as fast as several that wait for each other
NEAR = 1e-4  # a tie as near as this, as a share of the largest score too, is torch's to decide


class NativeRows(Rows):
    """Rows in C. Samples are torch's own, for C's noise is torch's but for the last digits: where
    two scores are nearly tied, torch draws. Sums are torch's to rounding."""

    def __init__(self, threads: NativeThreads) -> None:
        self._threads, self._noise = threads, torch.empty(0)

    def largest(self, scores: Tensor) -> Tensor:
        """Rows.largest: scores [n, V] of any floating dtype -> int64 [n]."""
        return self._drawn(scores.float().contiguous())[0]

    def draw(
        self, scores: Tensor, depths: Tensor, deepest: int, place: Position, seed: int | Tensor
    ) -> Tensor:
        """Rows.draw: scores [n, V] of any floating dtype, depths int64 [n] -> int64 [n]."""
        if not isinstance(place, int) or not isinstance(seed, int):
            return super().draw(scores, depths, deepest, place, seed)
        scores = scores.float().contiguous()
        job = Draw(depths=depths.data_ptr(), seed=seed, place=place, deepest=deepest)
        tokens, gaps = self._drawn(scores, self._with_noise(job, scores.shape[1]))
        limit = NEAR * max(1.0, abs(float(scores.max())))
        if float(gaps.min()) > limit:
            return tokens
        return super().draw(scores, depths, deepest, place, seed)

    def draw_each(self, scores: Tensor, places: Tensor, seeds: Tensor) -> Tensor:
        """`draw` of rows of different texts, scores [n, V]: row i by seed i at place i of its text,
        int64 [n] each -> tokens int64 [n]; the largest where the place is under 0."""
        scores, depths = scores.float().contiguous(), torch.arange(len(scores))
        job = Draw(None, *(t.data_ptr() for t in (depths, places, seeds)), deepest=len(scores) - 1)
        tokens, gaps = self._drawn(scores, self._with_noise(job, scores.shape[1]))
        limits = NEAR * scores.amax(-1).abs().clamp(min=1.0)
        for row in ((gaps <= limits) & (places >= 0)).nonzero()[:, 0].tolist():
            one, place, seed = scores[row : row + 1], int(places[row]), int(seeds[row])
            tokens[row] = super().draw(one, depths[:1], 0, place, seed)[0]
        return tokens

    def _with_noise(self, job: Draw, size: int) -> Draw:
        """`job` with memory for the noise of every depth, `size` numbers each."""
        needed = (job.deepest + 1) * size
        if self._noise.numel() < needed:
            self._noise = torch.empty(needed)
        job.noise = self._noise.data_ptr()
        return job

    def _drawn(self, scores: Tensor, job: Draw | None = None) -> tuple[Tensor, Tensor]:
        job = job or Draw()
        rows = scores.shape[0]
        tokens, gaps = torch.empty(rows, dtype=torch.long), torch.empty(rows)
        job.scores, job.tokens, job.gaps = (t.data_ptr() for t in (scores, tokens, gaps))
        job.rows, job.size = rows, scores.shape[1]
        self._threads.c.draw(byref(job), self._count(scores))
        return tokens, gaps

    def sums(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Rows.sums: scores [n, V] of any floating dtype -> float32 [n] twice."""
        scores = scores.float().contiguous()
        sums, entropies = (torch.empty(scores.shape[0]) for _ in range(2))
        job = Sums(scores.data_ptr(), sums.data_ptr(), entropies.data_ptr(), *scores.shape)
        self._threads.c.row_sums(byref(job), self._count(scores))
        return sums, entropies

    def _count(self, scores: Tensor) -> int:
        """How many threads read scores [n, V]."""
        return self._threads.count if scores.numel() > FEW else 1
