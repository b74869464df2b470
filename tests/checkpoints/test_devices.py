"""The precision that is chosen where none is named: by what the processor multiplies itself."""

import pytest
import torch

from medusa_chat.checkpoints.devices import choose_precision
from medusa_chat.cli.torch_facts import processor


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
