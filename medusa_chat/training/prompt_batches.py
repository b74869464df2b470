"""PromptBatch: prompts that are answered at one temperature, with one seed."""

from collections.abc import Sequence
from dataclasses import dataclass

SEED_STRIDE = 1009  # between the seeds of two batches; the rows of a batch lie between


@dataclass(frozen=True)
class PromptBatch:
    """Prompts (token ids). temperature: 0 is greedy."""

    prompts: Sequence[Sequence[int]]
    temperature: float
    seed: int

    def seed_of(self, row: int) -> int:
        """The seed of one prompt alone, where each has its own."""
        return (self.seed * SEED_STRIDE + row) % 2**63
