"""Experts in C: a row passes through the ones that transformers chooses, only these are read, and
they lie in memory as they are stored."""

import pytest
import torch
from support.engines import engine_of, tokens
from support.families import VOCABULARY, YARN, tiny
from support.native_engines import lay_out, made_native, native_engine

from medusa_chat.bench.steps import bytes_read
from medusa_chat.checkpoints.step_prior import step_prior
from medusa_chat.decoding.backends import native_check, native_step
from medusa_chat.decoding.backends.native_experts import NativeExperts, NativeStack, pack_experts
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_step import NativeDecoder
from medusa_chat.decoding.backends.native_weights import UNCHANGED, Quantised
from medusa_chat.decoding.backends.parity import share
from medusa_chat.decoding.fused_layers import FusedDecoder
from medusa_chat.decoding.layer_forms import LayerForm

# where the frequencies that are mixed begin and end within whole numbers
PARTED = YARN | {"original_max_position_embeddings": 64, "beta_slow": 0.1}
IDS = torch.arange(9) * 7 % VOCABULARY


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3-moe", {"norm_topk_prob": False}),
        ("qwen3-moe", {"num_experts_per_tok": 6}),  # all of them
        ("qwen3-moe", {"num_experts": 40, "moe_intermediate_size": 20}),
        ("gpt-oss", {"rope_parameters": PARTED | {"truncate": False}}),
        ("gpt-oss", {"rope_parameters": PARTED | {"truncate": True}}),
        ("gpt-oss", {"sliding_window": 3, "swiglu_limit": 0.5}),
    ],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_go_where_transformers_sends_them(family, changes, threads, library):
    model = tiny(family, **changes)
    expected = model(IDS[None]).logits[0]
    backbone = native_engine(family, library, threads, **changes).backbone
    with torch.inference_mode():
        found = backbone.lm_head(backbone.run_chunk(IDS))
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_yarn_without_whole_numbers_turns_otherwise(library):
    """`truncate` changes the frequencies, so that the test above could tell."""
    logits = [
        tiny("gpt-oss", rope_parameters=PARTED | {"truncate": told})(IDS[None]).logits
        for told in (False, True)
    ]
    assert not torch.allclose(*logits, atol=1e-3)


def test_experts_that_no_row_chose_are_not_read(library):
    """They are no numbers here, and would make all that they are added to none."""
    backbone = native_engine("qwen3-moe", library, 2, num_experts=24).backbone
    one = IDS[3:4]
    with torch.inference_mode():
        expected = backbone.run_chunk(one)
        backbone.cache.crop(0)
        for stack in backbone.model.modules():
            if isinstance(stack, NativeStack):
                stack.panels.view(stack.count, -1)[_unchosen(backbone, one, stack)] = -1
        assert torch.equal(backbone.run_chunk(one), expected)
        backbone.cache.crop(0)
        assert not backbone.run_chunk(torch.arange(VOCABULARY)).isfinite().all()


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "granite-moe", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_bits_beside_one_row_as_beside_a_hundred(family, dtype, library):
    count = {"num_experts" if family == "qwen3-moe" else "num_local_experts": 9}
    backbone = native_engine(family, library, 3, dtype, 256, **count).backbone
    ids = torch.arange(100) * 11 % VOCABULARY
    with torch.inference_mode():
        whole = backbone.run_chunk(ids)
        backbone.cache.crop(0)
        parts = [backbone.run_chunk(part) for part in ids.split([1, 2, 70, 26, 1])]
    assert torch.equal(torch.cat(parts), whole)


def _unchosen(backbone, ids, stack):
    """The experts of the stack's layer that the last layer but one's states do not go to."""
    chosen = set()
    twin = backbone.model.get_decoder()

    def note(module, given, _):
        if stack in list(module.modules()):
            chosen.update(given[1].flatten().tolist())

    hooks = [m.register_forward_hook(note) for m in twin.modules() if isinstance(m, NativeExperts)]
    twin(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [expert for expert in range(stack.count) if expert not in chosen]


TIED = {"num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 1}


def test_near_ties_of_experts_leave_a_mixture_in_c(library):
    """In 16 bits some rows go to another expert than in fp32, and are nothing like theirs then; the
    check at the load does not mind."""
    engine = native_engine("mixtral", library, 2, torch.bfloat16, seed=3, **TIED)
    twin = FusedDecoder(engine.backbone.model.get_decoder())
    ids = torch.arange(24) * 7 % VOCABULARY
    with torch.inference_mode():
        reference = native_check.Reference(engine.backbone, twin, ids)
        expected = reference.states(reference.embedded)
        engine.backbone.cache.crop(0)
        assert share(engine.backbone.run_chunk(ids), expected) > 0.4


def _unnormed(layer):
    layer.experts.is_normed = not layer.experts.is_normed


def _sharper(layer):
    layer.scaling *= 2


def _fewer(layer):
    layer.experts.chosen -= 1


def _other_residual(layer):
    layer.residual *= 1.3


@pytest.mark.parametrize(
    ("breaks", "dtype"),
    [
        *((breaks, torch.float32) for breaks in (_unnormed, _sharper, _fewer, _other_residual)),
        *((breaks, torch.bfloat16) for breaks in (_sharper, _fewer, _other_residual)),
    ],
)
def test_a_mixture_whose_pass_is_wrong_in_one_layer_is_not_run_by_c(
    breaks, dtype, library, monkeypatch, caplog
):
    fill = NativeDecoder._fill

    def broken(self, layer, kv, out, rotary):
        fill(self, layer, kv, out, rotary)
        if layer.index == 2:
            breaks(out)

    monkeypatch.setattr(NativeDecoder, "_fill", broken)
    model = tiny("qwen3-moe", mlp_only_layers=[]).to(dtype)
    lay_out(model, library)
    backbone = engine_of(model).backbone
    assert native_step.attach(backbone, None, NativeLibrary(library, 2)) is None
    assert "off by" in caplog.text


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "gemma4", "afmoe"])
@pytest.mark.parametrize("keep", [UNCHANGED, Quantised(8)])
def test_the_layers_of_a_family_multiply_packed_experts(family, keep, library):
    changes = {"intermediate_size": 64, "hidden_size": 64}
    if family == "gemma4":
        changes |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    if family in ("gemma4", "afmoe"):
        changes |= {"moe_intermediate_size": 32}
    model = tiny(family, **changes)
    expected = model(IDS[None]).logits
    pack_experts(model, NativeLibrary(library, 2), keep)
    stacks = [m for m in model.modules() if isinstance(m, NativeStack)]
    assert stacks and not any(".experts." in name for name, _ in model.named_parameters())
    limit = 0.1 if isinstance(keep, Quantised) else 1e-5
    off = (model(IDS[None]).logits - expected).norm(dim=-1).median()
    assert off < limit * expected.norm(dim=-1).median()


@pytest.mark.parametrize("keep", [Quantised(8), Quantised(4)])
def test_rounded_experts_decode_alike_with_every_drafter(keep, library):
    from support.engines import TREES, drafters_of

    model = tiny("qwen3-moe", hidden_size=64, moe_intermediate_size=64, intermediate_size=64)
    lay_out(model.bfloat16(), library, keep)
    engine = made_native(engine_of(model), library, 2)
    plain = tokens(engine, temperature=0.8)
    for drafter in drafters_of(engine, plain, TREES["dense"], 0.8):
        assert tokens(engine, drafter=drafter, temperature=0.8) == plain


def test_a_form_says_how_experts_are_chosen():
    layers = tiny("qwen3-moe").model.layers
    forms = [LayerForm.of(layer).experts for layer in layers]
    assert forms[1] is None and (forms[0].count, forms[0].chosen) == (6, 2)
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0, 0.5]])
    experts, shares = forms[0].choice(scores)
    assert experts.tolist() == [[1, 3]] and float(shares.sum()) == pytest.approx(1)


def test_a_plain_step_reads_the_experts_of_one_row(library):
    few = bytes_read(native_engine("qwen3-moe", library, num_experts_per_tok=2))
    all_of_them = bytes_read(native_engine("qwen3-moe", library, num_experts_per_tok=6))
    outs = [-(-size // library.panel()) * library.panel() for size in (16, 16, 32)]  # whole panels
    stacks = 2 * 6 * (32 * outs[0] + 32 * outs[1] + 16 * outs[2]) * 4  # of two layers
    assert all_of_them - few == pytest.approx(stacks * 4 / 6)


def test_rows_of_a_mixture_are_priced_by_the_experts_that_they_read():
    sizes = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 64, "model_type": "qwen3_moe"}
    experts = {"num_experts": 64, "moe_intermediate_size": 64}

    def costs(config):
        return step_prior(torch.device("cpu"), "Q4_K", True, config, 0, True).costs()

    dense = costs(sizes)
    few, half, everyone = (
        costs(sizes | experts | {"num_experts_per_tok": chosen}) for chosen in (4, 32, 64)
    )
    assert list(everyone) == pytest.approx(list(dense))
    assert few[1] > half[1] > dense[1] and few[3] > 2 > dense[3]
    assert list(few) == sorted(few)
