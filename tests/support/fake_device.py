"""Fake tensors, on a device that stands for a GPU: shapes and devices without numbers.

What would wait for the device, or copies between it and the host, raises. The device is "meta":
for CUDA torch asks for a driver, even where no number is there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")


@contextmanager
def fake_device() -> Iterator[None]:
    """Tensors made inside are fake, and on the device unless another one is named."""
    with FakeTensorMode(allow_non_fake_inputs=True), Apart(), DEVICE:
        yield


class Apart(TorchDispatchMode):
    """Nothing is copied between the device and the host; numbers that operators take are."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = operator(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in (args, out))
        crosses = {t.device for t in made} != {t.device for t in given} and given and made
        if crosses or ("copy" in str(operator) and len({t.device for t in given}) > 1):
            raise RuntimeError(f"{operator} copies between the host and the device: it waits")
        if str(operator).startswith("aten.copy_") and not args[0].dim():
            raise RuntimeError("a number for one element is copied from the host: it waits")
        return out
