"""The precision that is chosen where none is named: by what the processor multiplies itself."""

import pytest
import torch

from medusa_chat.checkpoints import devices, load
from medusa_chat.checkpoints.devices import choose_precision
from medusa_chat.cli import doctor
from medusa_chat.cli.doctor import processor
from medusa_chat.messages import LoadRequest


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "precision"),
    [(True, True, "bf16"), (False, True, "bf16"), (False, False, "fp32")],
)
def test_bf16_is_chosen_where_the_processor_has_it_and_doctor_says_the_same(
    monkeypatch, amx, avx512_bf16, precision
):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert choose_precision("auto", torch.device("cpu"))[0] == precision
    assert processor()["fast bf16"] == (precision == "bf16")


@pytest.mark.parametrize(
    ("system", "remedy"), [("win32", "pytorch.org"), ("linux", "pip install --force-reinstall")]
)
def test_a_gpu_that_torch_cannot_use_is_told_by_doctor(monkeypatch, system, remedy):
    """PyPI's torch for Windows computes on the CPU alone."""
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(devices.sys, "platform", system)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    problems = []
    doctor.devices(problems)
    assert remedy in problems[0]


def test_a_gpu_that_the_user_hides_is_not_told(monkeypatch):
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    for hides in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides)
        assert devices.cuda_remedy() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert devices.cuda_remedy()


def test_a_load_on_the_cpu_says_that_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(load, "cuda_remedy", lambda: ["there is an NVIDIA driver"])
    for device, says in (("auto", True), ("cpu", False)):
        *_, (_, loaded) = load.load(LoadRequest("demo", device=device))
        assert ("there is an NVIDIA driver" in loaded.info.notes) == says
