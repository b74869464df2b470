"""The kernels that read rows of scores: each beside torch's operators, and adopted alone.

They were tested in Triton's interpreter and never ran on a GPU: every load tries each of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from medusa_chat.decoding.acceptance import TORCH
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.kernels import kernel
from medusa_chat.decoding.backends.parity import Timer, largest, pays

NAMES = {  # of a function of acceptance.Rows: what a load says
    "draw": "samples and their noise in one kernel",
    "sums": "entropies in one kernel",
}
ROWS = (1, 16)  # of steps that they are timed at
OFF = 1e-4  # of a sum from torch's, as a share of the largest; no token is another one


def use_where_faster(name: str, backbone: Backbone, timer: Timer) -> list[str]:
    """Let a backbone's logits be read by the kernel `name`, where it agrees with torch's operators
    and the timer measures it as faster; a sentence if so."""
    size, device = backbone.vocabulary, backbone.device
    given = (arguments(name, rows, size, device) for rows in ROWS)
    pairs = (tuple(partial(way, *one) for way in ways(name)) for one in given)
    instead = f"{NAMES[name]}: torch's operators instead"
    if not pays(instead, partial(difference, name, size, device), OFF, pairs, timer):
        return []
    setattr(backbone.rows, name, kernel("rows", name))
    return [NAMES[name]]


def ways(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Torch's function of Rows, and ours."""
    return getattr(TORCH, name), kernel("rows", name)


def difference(name: str, size: int, device: torch.device) -> float:
    """The kernel's largest difference from torch's operators on random scores [n, size], as a share
    of the largest; of tokens the share that is another one."""
    shares = []
    for rows in (1, 5, 16):
        given = arguments(name, rows, size, device)
        wanted, found = (way(*given) for way in ways(name))
        if name == "draw":
            shares.append(float((wanted != found).float().mean()))
        else:
            pairs = zip(wanted, found, strict=True)
            shares += [float((a - b).abs().max() / a.abs().max()) for a, b in pairs]
    return largest(shares)


def arguments(name: str, rows: int, size: int, device: torch.device) -> tuple[Any, ...]:
    """Random arguments of a function of Rows, the same at every call: a few scores are left out, as
    top-p leaves them."""
    generator = torch.Generator(device).manual_seed(rows)
    scores = 4 * torch.randn(rows, size, generator=generator, device=device)
    scores.masked_fill_(scores < -6, -torch.inf)
    if name == "sums":
        return (scores,)
    depths = torch.arange(rows, device=device) % 4
    place, seed = torch.tensor([99, 2**40 + 3], device=device).split(1)
    return scores, depths, 3, place, seed
