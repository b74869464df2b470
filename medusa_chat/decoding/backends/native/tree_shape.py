"""Shape: a tree's constants as the C library reads them."""

from ctypes import addressof, c_int64, pointer

import torch

from medusa_chat.decoding.backends.native.structs import Growth, Proposal
from medusa_chat.decoding.drafters import Plan


class Shape:
    """The constants of a tree: the addresses of its parents, depths and additive ancestor mask [n,
    n]; the heads' job; and the job of a dynamic tree where only a part of the nodes is drafted."""

    def __init__(self, plan: Plan, draft: Proposal | None) -> None:
        self.nodes, self.depth = len(plan.tree), plan.tree.depth
        self._tensors, self._index = (
            plan.tensors,
            plan.index,
        )  # kept alive: their addresses are used
        hidden = ~plan.tensors.ancestors
        self._mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        self.parents, self.depths = plan.tensors.parents.data_ptr(), plan.tensors.depths.data_ptr()
        self.hides = self._mask.data_ptr()
        self.draft = draft
        self.pointer = pointer(draft) if draft is not None else None
        self.growth: Growth | None = None
        if draft is not None and plan.grower is not None:
            self.growth = self._growth()
            draft.growth = pointer(self.growth)

    def _growth(self) -> Growth:
        """The job that selects a part of this tree; the pass then reads the part's constants."""
        job, size = Growth(self.parents, self.depths, self.hides), self.nodes
        self._own = [(c_int64 * size)() for _ in range(3)]
        self._own_mask = torch.zeros(size, size)
        job.nodes = job.stride = size
        job.chosen, job.own_parents, job.own_depths = map(addressof, self._own)
        job.own_mask = self._own_mask.data_ptr()
        self.parents, self.depths = job.own_parents, job.own_depths
        self.hides = job.own_mask
        return job

    def chosen(self, count: int) -> tuple[int, ...]:
        """The first `count` nodes that the last draft selected."""
        return tuple(self._own[0][:count])
