"""Study "roofline": measured steps against what reading and multiplying the weights must take."""

from collections.abc import Iterator

import torch

from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.rows import Row, row
from medusa_chat.bench.steps import bytes_read, step_of, times_by_nodes
from medusa_chat.checkpoints.devices import most_threads, torch_threads

BUFFER = {"cpu": 2**28, "cuda": 2**33}  # bytes, more than any cache
READS = 7  # of the buffer
SIDE, REPEATS = 2048, 5  # of the square matrices whose product shows the peak


def roofline(context: BenchContext) -> Iterator[Row]:
    """Milliseconds of a step at each number of nodes, against the larger of two times (Medusa,
    appendix G): reading the backbone's weights once at the fastest rate measured here, and two
    operations a weight and node at the rate of a large product. The cache and the heads are left
    out, so a step is slower than that."""
    with torch_threads(most_threads()):
        rate, peak = max(read_rates(context)), _peak(context)
    weights = bytes_read(context.loaded.engine)
    work = 2 * _multiplied(context)
    yield row("read bandwidth", [rate / 1e9], "GB/s")
    yield row("large product", [peak / 1e9], "GFLOP/s")
    _, _, by_nodes = times_by_nodes(context)
    for nodes, values in by_nodes.items():
        if values:
            reading, arithmetic = weights / rate, work * nodes / peak
            least = 1e3 * max(reading, arithmetic)
            note = f"bound by {'reading' if reading > arithmetic else 'arithmetic'}: {least:.3g} ms"
            base = [least] * len(values)
            yield row(step_of(nodes), values, "ms", "the roofline", base, note)


def read_rates(context: BenchContext) -> list[float]:
    """Bytes a second of sums over a buffer larger than any cache."""
    device = context.loaded.engine.backbone.device
    size = BUFFER.get(device.type, BUFFER["cpu"])
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 2)
    buffer = torch.ones(size // 4, device=device)
    seconds = [context.seconds(lambda: float(buffer.sum())) for _ in range(1 + READS)]
    return [buffer.nbytes / one for one in seconds[1:]]


def _multiplied(context: BenchContext) -> int:
    """Weights that each row is multiplied with, whatever their format: all but an embedding table
    that is not the LM head too."""
    config = context.loaded.engine.backbone.config.get_text_config()
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return context.loaded.info.parameters - int(table)


def _peak(context: BenchContext) -> float:
    """Operations a second of the fastest of some products of large matrices, in the precision of
    what is multiplied with the weights."""
    device = context.loaded.engine.backbone.device
    dtype = torch.float32 if context.loaded.info.precision == "fp32" else torch.bfloat16
    matrix = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
    return 2 * SIDE**3 / min(context.seconds(lambda: matrix @ matrix) for _ in range(REPEATS + 1))
