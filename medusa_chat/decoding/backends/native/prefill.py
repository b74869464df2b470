"""Reading: reads the next tokens of a text into the cache and decides the one after, as one
call."""

from collections.abc import Sequence
from ctypes import addressof, c_int64, memmove, pointer, sizeof

import torch

from medusa_chat.decoding.backends.native.structs import Pass, Step, Verdict
from medusa_chat.decoding.settings import CHUNK


class Reading:
    """The job of a step whose rows are a text and not a tree."""

    def __init__(self, step: Step, rows: Pass, size: int) -> None:
        """step, rows: the jobs of decoding steps, whose work space it shares; size: of a state."""
        self._ids, self._places = ((c_int64 * CHUNK)() for _ in range(2))
        self._hidden = torch.empty(CHUNK, size)
        self._hides = torch.full((CHUNK, CHUNK), -torch.inf).triu_(1)
        self._pass = Pass.from_buffer_copy(rows)
        self._pass.mask, self._pass.stride = self._hides.data_ptr(), CHUNK
        self._pass.hidden = self._hidden.data_ptr()
        self._pass.tokens, self._pass.positions = addressof(self._ids), addressof(self._places)
        self._job = Step.from_buffer_copy(step)
        self._job.draft, self._job.work, self._job.is_text = None, pointer(self._pass), 1
        self._job.tokens, self._job.positions = self._pass.tokens, self._pass.positions
        self.verdict, self._noise = Verdict(), torch.empty(0)
        self._alone = torch.zeros(1, dtype=torch.long)  # its own parent, of depth 0
        self._job.verdict = pointer(self.verdict)

    def follow(self, verdict: Verdict) -> None:
        """Take over how the decoding steps decide, for the last row alone."""
        memmove(addressof(self.verdict), addressof(verdict), sizeof(Verdict))
        mine = self.verdict
        if self._noise.numel() < mine.size:
            self._noise = torch.empty(mine.size)
        mine.parents = mine.depths = self._alone.data_ptr()
        mine.rows, mine.deepest, mine.noise = 1, 0, self._noise.data_ptr()

    def at(self, tokens: Sequence[int], start: int, threads: int, work: int) -> Step:
        """The job that reads these tokens after `start` tokens. work: address of the work space."""
        job = self._pass
        self._ids[: len(tokens)] = list(tokens)
        job.rows, job.start, job.free = len(tokens), start, start
        job.threads, job.work = threads, work
        return self._job
