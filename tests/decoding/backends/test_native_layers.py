"""What a description of a layer says, and C does: windows, taps, a wider input, packed linears."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from support.engines import engine_of, tokens
from support.families import VOCABULARY, tiny
from support.native_engines import lay_out, made_native, native_engine
from torch.nn import functional as F

from medusa_chat.decoding.backends import native_step
from medusa_chat.decoding.backends.native_layers import PackedEmbedding
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_step import NativeDecoder
from medusa_chat.decoding.backends.native_weights import (
    UNCHANGED,
    NativeLinear,
    Quantised,
    quantise_linears,
)
from medusa_chat.decoding.backends.replacements import wrap
from medusa_chat.decoding.draft import Draft, TreeTensors
from medusa_chat.decoding.fused_layers import FusedDecoder
from medusa_chat.decoding.kv_cache import KVCache, Shape
from medusa_chat.decoding.layer_forms import LayerForm
from medusa_chat.decoding.tree import Tree

CPU = torch.device("cpu")
TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 0, 0), (1, 0), (0, 0, 0, 0)])


def test_a_form_says_what_its_layer_computes():
    forms = [LayerForm.of(layer) for layer in tiny("gemma2").model.layers]
    assert [form.window for form in forms] == [8, None]
    assert {(form.gate, form.cap, form.heads, form.width) for form in forms} == {
        ("gelu", 2.0, (4, 2), 8)
    }
    turned = [LayerForm.of(layer).is_turned for layer in tiny("smollm3").model.layers]
    assert turned == [True, False]
    assert LayerForm.of(tiny("granite").model.layers[0]).residual == 0.6
    grown = LayerForm.of(tiny("ministral3").model.layers[0])
    assert grown.growth_at(torch.tensor([0, 15])).tolist() == [1, 1]
    assert grown.growth_at(torch.tensor([16])) > 1


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_before_a_window_are_not_read(library, dtype, threads):
    """They are no numbers here, and would make all that is added to them none. Keys are read by
    groups of 32."""
    backbone = native_engine("mistral-window", library, threads, dtype, context=160).backbone
    draft = Draft(torch.arange(len(TREE)), TreeTensors.of(TREE, CPU))
    found = []
    for is_broken in (False, True):
        backbone.cache.crop(0)
        backbone.run_chunk(torch.arange(120) * 7 % VOCABULARY)
        for layer in backbone.cache.layers.layers:
            if is_broken:
                layer.keys[:, :, :96] = layer.values[:, :, :96] = torch.nan
        found.append(backbone.run_tree(draft.tokens, draft.tensors))
    assert found[0].isfinite().all() and torch.equal(*found)


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite"])
@pytest.mark.parametrize("threads", [1, 2])
def test_taps_are_the_states_behind_their_layers(library, family, threads):
    """As transformers gives them, in the order asked for; of a tree's rows and a prompt's alike."""
    ids = torch.arange(20) * 7 % VOCABULARY
    model = tiny(family, num_hidden_layers=3, **_kinds(family))
    states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    engine = native_engine(family, library, threads, num_hidden_layers=3, **_kinds(family))
    backbone, decoder = engine.backbone, engine.backbone.decoder
    plain = backbone.run_chunk(ids)
    backbone.cache.crop(0)
    decoder.tap([1, 0])
    assert torch.equal(backbone.run_chunk(ids), plain)
    assert decoder.tapped.shape == (20, 2, 32)
    for place, layer in enumerate((1, 0)):
        assert torch.allclose(decoder.tapped[:, place], states[layer + 1][0], atol=2e-4)
    tensors = TreeTensors.of(TREE, CPU)
    backbone.run_tree(torch.arange(len(TREE)), tensors)
    tree = decoder.tapped
    backbone.run_tree(torch.tensor([0]), TreeTensors.of(Tree.from_choices([]), CPU))
    assert tree.shape == (len(TREE), 2, 32) and torch.equal(decoder.tapped[0], tree[0])
    with pytest.raises(IndexError):
        decoder.tap([3])


def _kinds(family):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return {"layer_types": kinds} if family == "gemma3" else {}


def test_a_layer_may_read_the_embeddings_beside_the_states_it_gets(library):
    """One layer as drafters have it: q, k and v of embeddings and states, each normed, side by
    side; what is added goes to the states."""
    torch.manual_seed(3)
    model = tiny("llama", num_hidden_layers=1)
    stock, attention = model.model, model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        outs = getattr(attention, name).out_features
        wide = torch.nn.Linear(64, outs, bias=False).requires_grad_(False)
        setattr(attention, name, wide)
    layer, beside = stock.layers[0], torch.nn.RMSNorm(32, 1e-6).requires_grad_(False)
    beside.weight.copy_(torch.rand(32) + 0.5)
    ids, states = torch.tensor([5, 9, 30]), torch.randn(3, 32)
    expected = _wide_layer(stock, layer, beside, ids, states)
    lay_out_one(layer, library)
    merged = wrap(layer)
    merged.beside = beside
    twin = SimpleNamespace(
        embed_tokens=stock.embed_tokens,
        layers=[merged],
        norm=torch.nn.RMSNorm(32, 1e-6).requires_grad_(False),
        rotary_emb=stock.rotary_emb,
        config=stock.config,
    )
    twin.norm.weight.copy_(stock.norm.weight)
    for name in ("before", "after"):
        norm = torch.nn.RMSNorm(32, 1e-6).requires_grad_(False)
        norm.weight.copy_(getattr(merged, name).weight)
        setattr(merged, name, norm)
    cache = KVCache([Shape(2, 8, CPU)] * 2, 16, torch.float32)
    native = NativeDecoder(FusedDecoder(twin), list(cache.layers.layers), NativeLibrary(library, 2))
    mask = torch.full((3, 3), -torch.inf).triu(1)
    native.tap([0])
    hidden = native.run_rows(ids, (0, 1, 2), mask, 0, states)
    assert torch.allclose(native.tapped[:, 0], expected, atol=1e-5)
    assert torch.allclose(hidden, stock.norm(expected), atol=1e-4)


def lay_out_one(layer, library):
    """The linears of a stock layer, each the C library's."""
    threads = NativeLibrary(library, 1)
    for parent in (layer.self_attn, layer.mlp):
        for name, linear in list(parent.named_children()):
            if type(linear) is torch.nn.Linear:
                setattr(parent, name, NativeLinear(linear, threads))


def _wide_layer(stock, layer, beside, ids, states):
    """The states behind it, by torch."""
    attention = layer.self_attn
    embedded = stock.embed_tokens(ids)
    x = torch.cat([beside(embedded), layer.input_layernorm(states)], -1)
    q, k, v = (
        getattr(attention, name)(x).view(3, -1, 8).transpose(0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    cos, sin = stock.rotary_emb(x, torch.arange(3)[None])

    def turned(y):
        half = torch.cat([-y[..., 4:], y[..., :4]], -1)
        return y * cos + half * sin

    mixed = F.scaled_dot_product_attention(
        turned(q)[None], turned(k)[None], v[None], is_causal=True, enable_gqa=True
    )
    states = states + attention.o_proj(mixed[0].transpose(0, 1).flatten(1))
    return states + layer.mlp(layer.post_attention_layernorm(states))


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3"])
def test_layers_whose_linears_are_packed_already_are_taken_as_they_are(library, family):
    """As a GGUF file is loaded. They decode to what layers do that are packed as they merge."""
    sizes, keep = {"hidden_size": 64, "intermediate_size": 64}, Quantised(8)
    made = []
    for is_packed in (True, False):
        model = tiny(family, **sizes).bfloat16()
        if is_packed:
            assert quantise_linears(model, NativeLibrary(library, 1), keep) > 0
        assert native_step.can_run(model)
        lay_out(model, library, keep)
        made.append(made_native(engine_of(model), library))
    settings = {"max_new_tokens": 30, "temperature": 0.8}
    assert tokens(made[0], **settings) == tokens(made[1], **settings)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("keep", [UNCHANGED, Quantised(8)])
def test_an_embedding_may_be_the_rows_of_the_packed_lm_head(library, family, keep):
    """Scaled as the family has it; with the numbers of the linear, whose values are rounded."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": True}
    model = tiny(family, **sizes).bfloat16()
    head, embedding = model.lm_head, model.model.embed_tokens
    table = NativeLinear(head, NativeLibrary(library, 1), keep("lm_head.weight", head.weight))
    packed = PackedEmbedding(table, embedding)
    ids = torch.arange(VOCABULARY).view(2, -1)
    difference = (packed(ids).float() - embedding(ids).float()).abs().max()
    assert packed(ids).dtype == torch.bfloat16
    assert difference <= (0 if keep is UNCHANGED else 0.02 * embedding(ids).abs().max())
    with torch.no_grad():  # both then have the numbers of the table
        head.weight.copy_(packed.rows(torch.arange(VOCABULARY)))
    found = []
    for is_packed in (False, True):
        own = deepcopy(model)
        if is_packed:
            own.set_input_embeddings(packed)
        lay_out(own, library)
        backbone = made_native(engine_of(own), library, 2).backbone
        found.append(backbone.run_chunk(torch.arange(20) * 7 % VOCABULARY))
    limit = 0.1 * found[0].abs().max() if isinstance(keep, Quantised) else 0
    assert (found[0] - found[1]).abs().max() <= limit
