"""What is packed while packages are imported is what a load would have packed, and only a gain."""

import numpy as np
import pytest
import torch
from support.gguf_models import tiny_model, write_gguf

from medusa_chat.checkpoints import packing
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.packing import begun
from medusa_chat.decoding.backends import native_weights
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

SIZES = {"hidden_size": 256, "intermediate_size": 256}


def request_of(path, **options):
    return LoadRequest(str(path), **{"device": "cpu"} | options)


def logits_of(loaded):
    backbone = loaded.engine.backbone
    backbone.cache.crop(0)
    with torch.inference_mode():
        return backbone.lm_head(backbone.run_chunk(torch.arange(20)))


@pytest.mark.parametrize(("family", "ties"), [("llama", True), ("qwen2", False), ("phi3", False)])
def test_a_load_takes_what_was_packed_and_has_the_same_bits(
    family, ties, library, tmp_path, monkeypatch
):
    model = tiny_model(family, **SIZES, tie_word_embeddings=ties)
    request = request_of(write_gguf(tmp_path / "a.gguf", model, "Q4_0"))
    (*_, (_, alone)) = load(request)
    begin = begun(request)
    begin._thread.join()
    packed = len(begin._packed)
    by_load = []
    real = native_weights.pack_rows
    monkeypatch.setattr(native_weights, "pack_rows", lambda *a: by_load.append(1) or real(*a))
    (*_, (_, beside)) = load(request, begin)
    assert packed and not begin._packed
    assert len(by_load) == (0 if family != "phi3" else 2 * (3 + 2))  # of parts, in each layer
    assert torch.equal(logits_of(alone), logits_of(beside))


def test_another_files_matrices_are_not_taken_and_end_with_the_load(library, tmp_path):
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    requests = [request_of(write_gguf(path, tiny_model(**SIZES), "Q4_0")) for path in paths]
    other = begun(requests[0])
    (*_, (_, loaded)) = load(requests[1], other)
    (*_, (_, alone)) = load(requests[1])
    assert torch.equal(logits_of(loaded), logits_of(alone))
    other._thread.join()
    assert other._packed
    other.stop()
    assert not other._packed and not other._thread.is_alive()


def test_a_matrix_that_cannot_be_packed_is_told_by_the_load(library, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES), "Q8_0")
    begin = begun(request_of(path))
    tensor = begin.weights.header.tensors["blk.0.ffn_up.weight"]
    begin.stop()
    with open(path, "r+b") as file:
        file.seek(tensor.start + 34 * 5)
        file.write(np.float16(np.nan).tobytes())
    begin = begun(request_of(path))
    begin._thread.join()
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight holds values"):
        list(load(request_of(path), begin))


def test_nothing_is_packed_that_a_load_would_not_want(library, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES), "Q4_0")
    assert begun(request_of(path, precision="bf16")) is None
    assert begun(request_of(tmp_path / "none.gguf")) is None
    assert begun(LoadRequest()) is None  # the demo, which is no GGUF file
    monkeypatch.setattr(packing.native_build, "library", lambda: None)
    assert begun(request_of(path)) is None
