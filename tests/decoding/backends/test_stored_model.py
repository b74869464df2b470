"""A whole model whose weights stay a GGUF file's blocks, as on a GPU: its answers are those of the
model of the unpacked numbers."""

from types import SimpleNamespace

import pytest
import torch
from support.engines import decode, engine_of
from support.families import tiny

from medusa_chat.checkpoints import kernel_trial
from medusa_chat.decoding.backends import stored_linear
from medusa_chat.decoding.backends.native_weights import StoredRows
from medusa_chat.decoding.backends.replacements import Outputs, replace_submodules
from medusa_chat.decoding.backends.stored_linear import (
    StoredEmbedding,
    StoredLinear,
    random_rows,
    store_linears,
)
from medusa_chat.decoding.fused_layers import FusedLayer
from medusa_chat.trees.shapes import cartesian

CPU = torch.device("cpu")
KINDS = {"q_proj": 2, "k_proj": 2, "v_proj": 8, "gate_proj": 20, "up_proj": 39}  # else Q8_0


def in_blocks(family, **sizes):
    """The model of the blocks' numbers, and the same with its blocks."""
    plain, blocks = tiny(family, **sizes), tiny(family, **sizes)
    generator, made = torch.Generator().manual_seed(0), {}
    for (name, weight), other in zip(plain.named_parameters(), blocks.parameters(), strict=True):
        if weight.dim() < 2:
            continue
        kind = KINDS.get(name.split(".")[-2], 8)
        rows = random_rows(kind, *weight.shape, generator)
        made[name] = StoredRows(kind, rows, weight.shape[1])
        scale = 1e-1 if kind == 8 else 1.0  # numbers of 8 bits are larger
        if kind in (2, 8, 20):  # fp16 scales, as small as a model's
            each = rows.view(len(rows), -1, 34 if kind == 8 else 18)
            each[..., :2] = (each[..., :2].clone().view(torch.float16) * 0.05 * scale).view(
                torch.uint8
            )
        with torch.no_grad():
            weight.copy_(made[name].values())
            other.copy_(weight)
    is_tied = blocks.config.tie_word_embeddings
    for module in list(blocks.modules()):
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            empty = torch.empty_like(module.weight, device="meta")
            module.weight = torch.nn.Parameter(empty, requires_grad=False)
    if is_tied:
        blocks.get_output_embeddings().weight = blocks.get_input_embeddings().weight
    store_linears(blocks, lambda name, weight: made[name], CPU, torch.float32)
    return plain, blocks


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_its_answers_are_those_of_the_numbers(family):
    plain, blocks = in_blocks(family, hidden_size=64, intermediate_size=128)
    ids = torch.randint(3, 48, (1, 20), generator=torch.Generator().manual_seed(0))
    wanted = plain(ids).logits
    assert torch.allclose(blocks(ids).logits, wanted, atol=1e-4)
    replace_submodules(plain), replace_submodules(blocks)
    tree = cartesian(3, 2)
    answers = [decode(engine_of(one, context=300), tree=tree)[-1] for one in (plain, blocks)]
    assert answers[0].token_ids == answers[1].token_ids


def test_queries_keys_and_values_are_merged_each_of_its_own_type():
    _, blocks = in_blocks("qwen2", hidden_size=64, intermediate_size=128)
    assert "2 layers merged" in replace_submodules(blocks)
    layer = blocks.model.layers[0]
    assert isinstance(layer, FusedLayer) and isinstance(layer.qkv, StoredLinear)
    assert [part.type for part in layer.qkv.parts] == [2, 8] and layer.qkv.bias is not None
    assert [part.type for part in layer.gate_up.parts] == [20, 39]
    assert isinstance(layer.stock.self_attn.v_proj, Outputs)


def test_a_tied_embedding_is_held_once():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
    _, blocks = in_blocks("gemma3", **sizes)
    embedding, head = blocks.get_input_embeddings(), blocks.get_output_embeddings()
    assert isinstance(embedding, StoredEmbedding) and isinstance(head, StoredLinear)
    assert embedding.held.data_ptr() == head.part0.data_ptr()


def test_a_load_says_of_each_type_whether_our_kernel_multiplies_it(monkeypatch):
    _, blocks = in_blocks("llama", hidden_size=64, intermediate_size=128)
    replace_submodules(blocks)
    backbone = engine_of(blocks, context=300).backbone
    monkeypatch.setattr(kernel_trial, "chosen_kernels", lambda device: (frozenset(), "asked"))
    notes = kernel_trial.try_kernels(backbone)
    assert len(notes) == 5 and all("unpacked in every step" in note for note in notes[:-1])
    monkeypatch.setattr(stored_linear, "has_kernel", lambda device, dtype, type: type == 8)
    notes = kernel_trial.try_kernels(backbone)
    assert sum("by our kernel" in note for note in notes) == 1
    layer = blocks.model.layers[0]
    assert layer.down.is_own and not layer.qkv.is_own


def test_logits_are_left_in_fp32_where_the_kernel_makes_them():
    _, blocks = in_blocks("llama", hidden_size=64, intermediate_size=128)
    head = engine_of(blocks, context=300).backbone.lm_head
    hidden = SimpleNamespace(half=torch.randn(3, 64).half())
    head.linear.weight = head.linear.weight.half()
    with torch.no_grad():
        assert not head.can_widen(hidden.half)
        head.linear.is_own = True
        assert head.can_widen(hidden.half)
