"""What every module with a kernel of its own does when the kernel fails or computes wrongly."""

from types import ModuleType

import pytest
import torch


def assert_bad_kernels_are_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """module: with `has_kernel`, which remembers its answer, and `difference`."""

    def fail(*device: object) -> float:
        raise RuntimeError("no compiler here")

    for difference, word in ((fail, "no compiler"), (lambda *d: 0.5, "off by 0.5")):
        module.has_kernel.cache_clear()
        caplog.clear()
        monkeypatch.setattr(module, "difference", difference)
        device = torch.device("cuda")
        assert not module.has_kernel(device) and not module.has_kernel(device)
        assert len(caplog.records) == 1 and word in caplog.text
    module.has_kernel.cache_clear()
