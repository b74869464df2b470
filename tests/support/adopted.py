"""Kernels of ours as if a load had adopted them, on fake tensors: shapes, and how many launch."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from medusa_chat.decoding.backends import split_attention

KERNELS = "medusa_chat.decoding.backends.kernels"


def adopt_split_attention(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Attention in splits runs on every device -> how many kernels it launched so far."""
    launched: Counter[str] = Counter()

    def run(query, key, value, words, scaling):
        launched.update(("split", "merge"))
        assert words.dim() == 2 and len(words) == query.shape[2]
        shape = 1, query.shape[2], query.shape[1], value.shape[3]
        return torch.empty(shape, dtype=query.dtype, device=query.device)

    patch.setitem(sys.modules, f"{KERNELS}.split", SimpleNamespace(run=run))
    patch.setattr(split_attention, "has_kernel", lambda *asked: True)
    return launched
