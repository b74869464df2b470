"""Random blocks of every type of a GGUF file that our CUDA kernel knows."""

import torch

from medusa_chat.decoding.backends.block_tiles import FLOORED, KINDS, POWERS, SIXES


def random_rows(type, outs, ins, seed=0):
    """Rows as a file has them, uint8 [outs, bytes]: any codes and small scales."""
    kind, generator = KINDS[type], torch.Generator().manual_seed(seed)
    shape = outs, ins // kind.block
    raw = torch.randint(256, (*shape, kind.size), generator=generator).to(torch.uint8)
    if kind.scales == POWERS:
        raw[..., 0] = torch.randint(118, 124, shape, generator=generator).to(torch.uint8)
        return raw.flatten(1)
    starts = [208] if kind.name == "Q6_K" else [0, 2] if kind.scales in (FLOORED, SIXES) else [0]
    for start in starts:
        scales = torch.rand(*shape, 1, generator=generator) - 0.3
        raw[..., start : start + 2] = (scales / 8).half().view(torch.uint8)
    return raw.flatten(1)
