"""Operators that launch a kernel, counted while code runs."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """found: how often each operator ran that is no view of its arguments and makes no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        given, made = (
            {t.untyped_storage()._cdata for t in tree_leaves(x) if isinstance(t, Tensor)}
            for x in (args, out)
        )
        is_view = bool(made) and made <= given and not name.endswith("_")
        if made and not is_view and not name.startswith("empty"):
            self.found[name] += 1
        return out
