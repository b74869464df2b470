"""A model's memory is one estimate, told in the same words wherever it is told."""

import json
from pathlib import Path

import psutil
import pytest
import torch
from support.checkpoints import write_checkpoint
from support.loading import loaded

from medusa_chat.checkpoints.devices import choose_device, device_memory
from medusa_chat.checkpoints.machine import Cpu, this_cpu
from medusa_chat.checkpoints.memory_needs import Estimate, automatic_precision
from medusa_chat.cli.main import main
from medusa_chat.messages import DeviceMemory
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.ui.models.checkpoint_lookup import CheckpointKey, MemoryTarget, look_up
from medusa_chat.ui.models.entries import Entry
from medusa_chat.ui.models.load_form import LoadChoices
from medusa_chat.ui.models.memory_fit import Machine
from medusa_chat.ui.models.picker import loaded_view
from medusa_chat.ui.models.rows import row_view
from medusa_chat.ui.page.status import status_line


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("told") / "model")


def test_every_place_tells_the_same_of_one_model(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    said = dict(line.strip().split(None, 1) for line in capsys.readouterr().out.splitlines()[1:-1])
    info = loaded(folder, precision="auto").info
    assert said["auto"] == f"takes {info.precision} on this machine"
    assert said[info.precision] == info.memory and "device" not in info.memory

    memory = device_memory(choose_device("auto"))
    target = MemoryTarget(memory.device.partition(":")[0], this_cpu())
    entry = Entry(str(folder), detail=look_up(CheckpointKey(str(folder)), False, target))
    row = row_view("here", entry, LoadChoices(), Machine(memory, target))
    assert row["takes"] == f"auto takes {info.precision}, {info.memory}"
    asked = row_view("here", entry, LoadChoices(precision="nf4"), Machine(memory, target))
    assert asked["takes"] == f"nf4, {said['nf4']}" and "; measured: " in said["nf4"]
    (chosen,) = (cell for cell in row["memory"] if cell["chosen"])
    assert info.memory.startswith(f"{chosen['size']}: ")

    assert loaded_view(info, None)["memory"] == info.memory
    facts = json.loads(status_line(ModelState("ready", model=info)))["facts"]
    ((figure, why),) = [fact[1:] for fact in facts if fact[0] == "memory"]
    assert f"{figure}: {why}" == info.memory


def test_a_load_tells_its_peak_only_where_it_is_more():
    assert Estimate(10**9, 0, 0, 0, 0, loading=10**7).words.endswith("0 bytes")
    assert "; up to 2 GB while loading" in Estimate(10**9, 0, 0, 0, 0, mapped=10**9).words


@pytest.mark.parametrize(
    ("free", "stored", "taken"),
    [
        *((100, "", "fp32"), (15, "", "bf16"), (5, "", "nf4"), (1, "", "")),
        *((100, "Q4_K_M", "Q4_K_M"), (5, "Q4_K_M", "")),
    ],
)
def test_auto_is_the_file_as_it_is_or_the_best_precision_that_fits(free, stored, taken):
    sizes = {"fp32": 20, "bf16": 10, "nf4": 4} | ({stored: 6} if stored else {})
    memory = {p: Estimate(size, 0, 0, 0, 0) for p, size in sizes.items()}
    machine = DeviceMemory("cpu", free, 100, "fp32")
    assert automatic_precision(memory, machine, Cpu(), stored) == taken


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model lies on the GPU")
@pytest.mark.skipif(not hasattr(psutil.Process().memory_info(), "shared"), reason="only on Linux")
def test_nothing_of_a_model_stays_in_mapped_files(folder):
    kept = loaded(folder)
    assert kept.info.precision == "fp32"
    maps = Path("/proc/self/maps").read_text("utf-8")
    assert str(folder / "model.safetensors") not in maps
