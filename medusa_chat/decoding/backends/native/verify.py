"""NativeVerifier: reads a draft's logits in one call into C."""

from ctypes import byref

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Verifier
from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.structs import Verdict
from medusa_chat.decoding.drafters import Draft, TreeTensors
from medusa_chat.decoding.sampling import Position, own_tokens
from medusa_chat.decoding.settings import GenerationSettings


class NativeVerifier(Verifier):
    """The Verifier for logits on a CPU, by the C library."""

    def __init__(self, team: NativeThreads) -> None:
        self._team = team
        self._noise = torch.empty(0)

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [n]; the lowest index wins a tie."""
        return self._own(logits, None, 0, 0, 0.0)

    def own_tokens(
        self, logits: Tensor, tensors: TreeTensors, position: Position, settings: GenerationSettings
    ) -> Tensor:
        """sampling.own_tokens: logits [n, V] -> int64 [n]; with top-k or top-p by torch."""
        if settings.is_greedy:
            return self.argmax(logits)
        if settings.top_k or settings.top_p < 1 or not isinstance(position, int):
            return own_tokens(logits, tensors, position, settings)
        assert settings.seed is not None, "a sampling run needs its seed resolved"
        return self._own(logits, tensors, position, settings.seed, settings.temperature)

    def _own(
        self,
        logits: Tensor,
        tensors: TreeTensors | None,
        position: int,
        seed: int,
        temperature: float,
    ) -> Tensor:
        logits = logits.float().contiguous()
        own = torch.empty(len(logits), dtype=torch.long)
        job = self._job(logits, seed, position, temperature)
        job.own = own.data_ptr()
        if tensors is not None:
            self._add_noise(job, tensors)
        self._team.judge(byref(job))
        return own

    def _add_noise(self, job: Verdict, tensors: TreeTensors) -> None:
        """Allocate the noise [depths, V] and set its address."""
        job.deepest, job.depths = tensors.paths.shape[1] - 1, tensors.depths.data_ptr()
        if self._noise.numel() < (job.deepest + 1) * job.size:
            self._noise = torch.empty((job.deepest + 1) * job.size)
        job.noise = self._noise.data_ptr()

    def figures(self, draft: Draft, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Verifier.figures: logits [n, V] -> float32 [n] and [n]."""
        logits = logits.float().contiguous()
        found = torch.empty(3, len(logits))  # log-probabilities, entropies, work space
        job = self._job(logits, 0, 0, temperature)
        job.parents, job.tokens = draft.tensors.parents.data_ptr(), draft.tokens.data_ptr()
        job.at_parent, job.entropies, job.sums = (row.data_ptr() for row in found)
        self._team.judge(byref(job))
        return found[0], found[1]

    def certainty(self, logits: Tensor, token: int, temperature: float) -> float:
        """Verifier.certainty, by logits [V]."""
        row = logits.float().contiguous()
        found: float = self._team.certainty(row.data_ptr(), len(row), temperature, token)
        return found

    def _job(self, logits: Tensor, seed: int, position: int, temperature: float) -> Verdict:
        job = Verdict(logits.data_ptr(), seed=seed, place=position, temperature=temperature)
        job.rows, job.size, job.threads = *logits.shape, self._team.threads
        return job
