"""A GGUF file on a GPU: its blocks stay as they are. There is no GPU here: the modules that a load
puts in run by their torch twin on a CPU."""

import pytest
import torch
from support.gguf_models import tiny_model, write_gguf

from medusa_chat.checkpoints.devices import held_bytes
from medusa_chat.checkpoints.gguf_model import gguf_model
from medusa_chat.checkpoints.gguf_rows import FileRows
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.machine import Cpu
from medusa_chat.checkpoints.memory_needs import NODES, estimates
from medusa_chat.checkpoints.step_prior import step_prior
from medusa_chat.checkpoints.weights import config_of, read_model
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.backends.stored_linear import StoredLinear, store_linears
from medusa_chat.messages import LoadRequest

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 256}
WITHOUT = Cpu(has_compiler=False)


def found_in(path):
    return with_settings(Checkpoint.find(LoadRequest(str(path))))


def stored_model(found, dtype=torch.float32):
    """As gguf_model and prepare leave it on a GPU, but for the embedding."""
    model = gguf_model(found, config_of(found), dtype, CPU, is_packed=True)
    store_linears(model, FileRows(GgufWeights.of(found)), CPU, dtype)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "kind", "ties"),
    [
        *(("llama", kind, False) for kind in ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "Q2_K")),
        *((family, "Q4_0", True) for family in ("qwen2", "gemma3", "qwen3")),
    ],
)
def test_its_logits_are_those_of_the_unpacked_file(family, kind, ties, tmp_path):
    model = tiny_model(family, **SIZES, tie_word_embeddings=ties)
    found = found_in(write_gguf(tmp_path / "a.gguf", model, kind))
    stored, plain = stored_model(found), read_model(found, config_of(found), "fp32", CPU)
    replace_submodules(stored)
    linears = [m for m in stored.modules() if isinstance(m, StoredLinear)]
    assert linears and not any(p.is_meta for p in stored.parameters())
    ids = torch.arange(20)[None]
    wanted = plain(ids).logits
    stored.set_attn_implementation("eager")
    assert torch.allclose(stored(ids).logits, wanted, atol=2e-3 * float(wanted.abs().max()))


def test_a_gpu_holds_the_bytes_of_the_file(tmp_path):
    model = tiny_model("llama", **SIZES, tie_word_embeddings=False)
    found = found_in(write_gguf(tmp_path / "a.gguf", model, "Q4_K"))
    files = found.weights
    for device in ("cuda", "mps"):  # where C is no matter
        first, parts = next(iter(estimates(files, None, 512, NODES, device, WITHOUT).items()))
        assert first == files.stored
        assert parts.weights == pytest.approx(files.bytes, rel=0.1)
    assert files.stored not in estimates(files, None, 512, NODES, "cuda", is_adapted=True)
    stored = stored_model(found, torch.bfloat16)
    table = stored.get_input_embeddings().weight.nbytes
    assert held_bytes(stored) - table == pytest.approx(parts.weights, rel=0.2)


def test_steps_in_the_types_of_a_file_are_priced_before_any_was_seen(monkeypatch):
    prior = step_prior(torch.device("mps"), "Q4_K", False, {}, 0)
    assert prior is not None
