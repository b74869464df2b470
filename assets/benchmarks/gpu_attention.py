"""The part of gpu.py about attention of torch: which backend is right and fast with a tree mask.

Each combination runs in a process of its own, for a misaligned address takes the CUDA context with
it. These are forked before CUDA is used, so that torch is imported once.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from gpu_clock import spans, timed
from gpu_part import Bench
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
MASKS, KEYS = ("aligned", "unaligned"), ("folded", "expanded")
SIZES = (8, 4, 64, 1003, 128)  # key heads, groups, rows, keys, width: 8B's and 64 nodes
TINY = (2, 2, 6, 43, 16)
LENGTHS = 5  # that were not met before
SECONDS = 30  # for one combination


def probe(bench: Bench) -> Iterator[tuple[str, Any]]:
    """By backend, mask (rows at multiples of 16 bytes, or not) and keys (the groups folded into
    rows, or keys expanded with stride 0): the largest difference from fp32 and milliseconds, of the
    same length again and of lengths that were not met before; or why it is refused."""
    for backend, mask, keys in product(BACKENDS, MASKS, KEYS):
        name = f"{backend}, {mask} mask, {keys} keys"
        yield name, _alone(_attempt, bench, backend, mask == "aligned", keys == "folded")


def _alone(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `work` returns in a process of its own, or how that ended."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    child = fork.Process(target=_send, args=(there, work, arguments), daemon=True)
    child.start()
    there.close()
    try:
        if not here.poll(SECONDS):
            return {"outcome": f"no answer in {SECONDS} s"}
        found: dict[str, Any] = here.recv()
        return found
    except EOFError:
        child.join(SECONDS)
        code = child.exitcode or 0
        return {"outcome": f"killed by {signal.Signals(-code).name}" if code < 0 else "ended"}
    finally:
        child.kill()
        child.join()


def _send(pipe: Any, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # a pool of threads does not outlive a fork
    try:
        pipe.send(work(*arguments))
    except Exception as error:
        pipe.send({"outcome": f"refused: {str(error).strip().partition(chr(10))[0]}"})


@torch.no_grad()
def _attempt(bench: Bench, backend: str, is_aligned: bool, is_folded: bool) -> dict[str, Any]:
    key_heads, groups, rows, count, width = bench.either(SIZES, TINY)
    device, dtype = bench.device, torch.float16
    torch.manual_seed(0)
    query = torch.randn(key_heads, groups, rows, width, device=device, dtype=dtype)
    cache = torch.randn(2, key_heads, count + 64, width, device=device, dtype=dtype)

    def call(keys: int) -> Tensor:
        """[H_kv, G, q, D] for the first `keys` keys of the cache."""
        key, value = cache[:, :, :keys]
        mask = _mask(rows, keys, device, dtype, is_aligned, groups if is_folded else 1)
        if is_folded:
            folded = query.flatten(1, 2)[None]
            out = F.scaled_dot_product_attention(folded, key[None], value[None], mask)
            return out[0].unflatten(1, (groups, rows))
        wide = (t.unsqueeze(1).expand(-1, groups, -1, -1) for t in (key, value))
        return F.scaled_dot_product_attention(query, *wide, attn_mask=mask)

    with sdpa_kernel([BACKENDS[backend]]):
        wanted = _in_fp32(query, *cache[:, :, :count], rows, count)
        off = float((call(count).float() - wanted).abs().max())
        again = timed(device, lambda: call(count), bench.either(20, 2))
        lengths = iter(range(count + 1, count + 1 + LENGTHS))
        fresh = spans(device, lambda: call(next(lengths)), LENGTHS)
    return {"outcome": "done", "off by": off, "ms": again, "ms of new lengths": fresh}


def _mask(
    rows: int, keys: int, device: str, dtype: torch.dtype, is_aligned: bool, groups: int
) -> Tensor:
    """The additive mask [1, 1, groups * rows, keys]; every row sees the text and itself."""
    padded = torch.zeros(groups, rows, keys + -keys % 8 + 8, device=device, dtype=dtype)
    start = 0 if is_aligned else 3
    mask = padded[:, :, start : start + keys]
    mask[:, :, keys - rows :].masked_fill_(~_seen(rows, device), -torch.inf)
    return mask.flatten(0, 1)[None, None]


def _seen(rows: int, device: str) -> Tensor:
    return torch.eye(rows, dtype=torch.bool, device=device)


def _in_fp32(query: Tensor, key: Tensor, value: Tensor, rows: int, keys: int) -> Tensor:
    scores = query.float() @ key.float().transpose(1, 2).unsqueeze(1) * query.shape[-1] ** -0.5
    scores[..., keys - rows :].masked_fill_(~_seen(rows, query.device.type), -torch.inf)
    return torch.softmax(scores, -1) @ value.float().unsqueeze(1)
