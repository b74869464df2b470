"""Stopwatch: how long the parts of a step took, without making the device wait for the host."""

from time import perf_counter

import torch


class Stopwatch:
    """Marks points in the work queued on a device and gives the seconds between them.

    On CUDA a mark is an event in the stream, so a part's time is the device's own and not that of
    launching it; `between` may be asked once the device has passed both marks. Elsewhere work is
    done when the call returns, and a mark is the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda, self._device = device.type == "cuda", device

    def mark(self) -> "torch.cuda.Event | float":
        """A mark after the work queued so far."""
        if not self._is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
        """Seconds from one mark to a later one."""
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        assert not isinstance(start, float) and not isinstance(end, float)
        return float(start.elapsed_time(end)) / 1000
