"""A GGUF file that is used as it is: the model of its own blocks is the unpacked one, within what
arithmetic in 8 bits costs, and nothing lies in memory twice."""

import numpy as np
import pytest
import torch
from support.gguf_families import NAMES
from support.gguf_models import tiny_model, write_gguf
from support.loading import answer

from medusa_chat.checkpoints.gguf_model import gguf_model
from medusa_chat.checkpoints.gguf_rows import FileRows
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.layouts import gguf_header
from medusa_chat.checkpoints.layouts.gguf_header import read_gguf
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.weights import config_of, read_model
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

SIZES = {"hidden_size": 256, "intermediate_size": 256}


def found_in(path):
    """The file with the folder of its settings."""
    return with_settings(Checkpoint.find(LoadRequest(str(path))))


FAMILIES = "mistral qwen2 qwen3 gemma3 phi3 granite cohere2 olmo2 exaone4 mixtral gpt_oss"
FAMILIES += " qwen3_moe qwen2_moe granitemoe glm4_moe deepseek_v2 minimax_m2"  # with experts
NEAR = 0.1  # of the length of the logits; bf16 alone gives 0.04 in such random models
NEAR_OF_EXPERTS = 0.15  # a row whose router is near a tie goes to other experts


@pytest.mark.parametrize(
    ("family", "kind", "ties"),
    [
        *(("llama", kind, False) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")),
        *(("llama", kind, True) for kind in ("Q5_1", "Q4_K", "Q2_K")),
        *((family, "Q4_0", None) for family in FAMILIES.split()),
    ],
)
def test_a_packed_model_has_the_logits_of_the_unpacked_one(family, kind, ties, library, tmp_path):
    told = {} if ties is None else {"tie_word_embeddings": ties}
    path = write_gguf(tmp_path / "a.gguf", tiny_model(family, **SIZES, **told), kind)
    (*_, (_, packed)) = load(LoadRequest(str(path), device="cpu"))
    assert packed.info.precision == kind
    assert packed.info.estimated_bytes == pytest.approx(packed.info.memory_bytes, rel=0.1)
    found = found_in(path)
    plain = read_model(found, config_of(found), "fp32", torch.device("cpu"))
    ids, backbone = torch.arange(40), packed.engine.backbone
    with torch.inference_mode():
        backbone.cache.crop(0)
        ours = backbone.lm_head(backbone.run_chunk(ids)).float()
        theirs = plain(ids[None]).logits[0]
    off = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    near = NEAR_OF_EXPERTS if backbone.has_experts else NEAR
    assert float(off.nanmedian()) < near
    assert answer(packed, "hello the hedgehog")[-1].stats.new_tokens > 0


def test_a_load_holds_the_file_and_never_a_second_copy(library, tmp_path, monkeypatch):
    """By the sizes of what is held: matrices in blocks lie in memory once, as they are packed."""
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES, num_hidden_layers=4), "Q4_0")
    found = found_in(path)
    rows = FileRows(GgufWeights.of(found))
    held = gguf_model(found, config_of(found), torch.bfloat16, torch.device("cpu"), True)
    floats = {name: p.nbytes for name, p in held.named_parameters() if not p.is_meta}
    assert not any(one in name for name in floats for one in ("proj", "lm_head", "embed_tokens"))
    (*_, (_, loaded)) = load(LoadRequest(str(path), device="cpu"))
    backbone = loaded.engine.backbone
    known = rows.bytes + sum(floats.values()) + backbone.cache.nbytes
    assert loaded.info.memory_bytes < 1.15 * known
    assert not any(p.is_meta for p in backbone.model.parameters())


def test_a_scale_that_is_no_number_is_refused_by_the_tensors_name(library, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES), "Q8_0")
    tensor = GgufWeights.of(found_in(path)).header.tensors["blk.0.ffn_up.weight"]
    with open(path, "r+b") as file:
        file.seek(tensor.start + 34 * 5)
        file.write(np.float16(np.nan).tobytes())
    for precision in ("auto", "fp32"):
        with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight holds values"):
            list(load(LoadRequest(str(path), device="cpu", precision=precision)))


@pytest.mark.parametrize("family", ["llama", "mistral3"])
def test_every_matrix_of_a_file_is_found_by_its_name(family, tmp_path, monkeypatch):
    monkeypatch.setitem(NAMES, "llama", family)
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**SIZES), "Q4_1")
    found = found_in(path)
    whole = read_model(found, config_of(found), "bf16", torch.device("cpu")).state_dict()
    rows = FileRows(GgufWeights.of(found))
    for name, weight in whole.items():
        assert rows.is_in_blocks(name) == (weight.dim() > 1), name
        if weight.dim() > 1:
            assert torch.equal(rows.rows(name).whole().values().bfloat16(), weight), name
    assert not rows.is_in_blocks("nothing.weight")


def test_an_unchanged_header_is_read_once(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", tiny_model())
    list(load(LoadRequest(str(path))))  # which reads the vocabulary too, for the tokenizer
    path.touch()
    parses = []
    read = gguf_header.read_part
    monkeypatch.setattr(gguf_header, "read_part", lambda *a: parses.append(1) or read(*a))
    with_settings(Checkpoint.find(LoadRequest(str(path))))
    parses.clear()
    list(load(LoadRequest(str(path))))
    assert not parses
    path.touch()
    assert read_gguf(LocalFolder(tmp_path), path.name).tensors and len(parses) == 1
