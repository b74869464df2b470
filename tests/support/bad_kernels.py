"""What every module with a kernel of its own does when the kernel fails or computes wrongly."""

from types import ModuleType

import pytest
import torch


def assert_bad_kernels_are_refused(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *asked: object,
) -> None:
    """module: with `has_kernel`, which remembers its answer, and `difference`. asked: arguments of
    `has_kernel` behind the device."""

    def fail(*device: object) -> float:
        raise RuntimeError("no compiler here")

    for difference, word in ((fail, "no compiler"), (lambda *d: 0.5, "off by 0.5")):
        module.has_kernel.cache_clear()
        caplog.clear()
        monkeypatch.setattr(module, "difference", difference)
        device = torch.device("cuda")
        assert not module.has_kernel(device, *asked) and not module.has_kernel(device, *asked)
        assert len(caplog.records) == 1 and word in caplog.text
    module.has_kernel.cache_clear()
