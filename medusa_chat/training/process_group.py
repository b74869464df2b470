"""ProcessGroup: the processes that train one model together, as `accelerate launch` starts them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """This process has the number `rank` (from 0) of `size`. Each runs its share of the rows of
    every batch; sums of losses and gradients over all processes equal those of a single one."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, on_cpu: bool) -> "ProcessGroup":
        """The group that the environment variables of `accelerate launch` describe; a group of one
        without them."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=on_cpu or not torch.cuda.is_available())
        return cls(state.process_index, state.num_processes)

    @property
    def is_first(self) -> bool:
        """Whether this process writes the output."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of the items."""
        return items[self.rank :: self.size]

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes, in place: any shape and dtype, the same in every
        process, on the device that the processes exchange tensors on."""
        if self.size > 1:
            torch.distributed.all_reduce(value)
        return value


ALONE = ProcessGroup()
