"""What a GPU asks of us and a CPU does not notice: held here by a spy, without a GPU."""

from types import SimpleNamespace

import pytest
import torch
from support.engines import TREES, decode, engine_of
from support.families import FAMILIES, tiny
from torch.nn import functional as F

from medusa_chat.checkpoints import devices, prepare, weights
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding import attention
from medusa_chat.decoding.attention import aligned, disable_cudnn_attention
from medusa_chat.decoding.draft import TreeTensors
from medusa_chat.decoding.graph_capture import GraphCapture
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree


@pytest.fixture
def calls(monkeypatch):
    """(query, key, value, mask) of every call of torch's attention."""
    found = []
    real = F.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **options):
        found.append((query, key, value, attn_mask))
        return real(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    return found


def is_fit(query, key, value, mask) -> bool:
    """What torch's memory-efficient kernel reads without raising, faulting or wrong numbers."""
    keys = all(0 not in t.stride()[:3] or t.shape[t.stride().index(0)] == 1 for t in (key, value))
    if mask is None:
        return keys
    rows = [s for n, s in zip(mask.shape[:-1], mask.stride()[:-1], strict=True) if n > 1]
    starts = mask.storage_offset() * mask.element_size() % 16 == 0 and mask.data_ptr() % 16 == 0
    last = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in rows)
    return keys and starts and last and mask.dtype == query.dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mask_is_aligned_and_no_key_is_expanded(family, calls):
    """Before, a tree's mask began wherever its text's length put it: most loads on RTX 20 to 50
    and A100 cards would have ended with a misaligned address."""
    engine = engine_of(tiny(family))
    check_steps(engine.backbone)
    decode(engine)
    for tree in TREES.values():
        decode(engine, tree=tree, drafter=engine.drafter(GenerationSettings(), tree))
    assert calls or engine.backbone.implementation == "eager"
    wrong = [call for call in calls if not is_fit(*call)]
    assert not wrong, f"{len(wrong)} of {len(calls)} calls"


@pytest.mark.parametrize("length", range(1, 20))
def test_a_mask_behind_a_text_of_any_length_is_aligned(length):
    backbone = engine_of(tiny("llama")).backbone
    backbone.run_chunk(torch.arange(length) % 40 + 3)
    tree = Tree.from_choices([(0,), (1,), (0, 0)])
    masks = backbone.node_masks(TreeTensors.of(tree, backbone.device))
    mask = aligned(backbone.masks_behind(masks, length, torch.arange(length + 4))[None])
    assert is_fit(mask, mask, mask, mask) and mask.shape == (4, length + 4)


def test_the_spy_sees_a_mask_that_a_gpu_refuses():
    mask = torch.zeros(4, 64)[:, 3:40]
    assert not is_fit(mask, mask, mask, mask)
    mended = aligned(mask)
    assert is_fit(mended, mended, mended, mended) and torch.equal(mended, mask)


def test_a_mask_that_is_aligned_is_not_copied():
    mask = torch.zeros(4, 64)
    assert aligned(mask) is mask


def test_cudnn_attention_is_left_out_on_cuda_alone():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        disable_cudnn_attention(torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        disable_cudnn_attention(torch.device("cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture
def card(monkeypatch):
    """A stand-in for torch's answer on a card: one with bf16 in hardware, or by emulation only."""

    def of(has_bf16: bool) -> None:
        def supported(including_emulation: bool = True) -> bool:
            return has_bf16 or including_emulation

        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)

    return of


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp16")])
def test_emulated_bf16_is_not_chosen(card, has_bf16, precision):
    """Turing has no bf16 in hardware; torch counts its emulation unless asked not to."""
    card(has_bf16)
    assert devices.choose_precision("auto", torch.device("cuda"))[0] == precision


@pytest.mark.parametrize(
    ("source", "has_bf16", "half"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float16),
        (torch.float16, True, torch.float16),
        (None, True, torch.float16),
    ],
)
def test_a_quantised_bf16_model_computes_in_bf16_where_the_card_has_it(
    card, source, has_bf16, half
):
    card(has_bf16)
    config = SimpleNamespace(dtype=source)
    assert weights._half(torch.device("cuda"), config) == half
    assert weights._half(torch.device("cpu"), config) == torch.bfloat16


def test_kernels_are_tried_on_the_models_own_device(monkeypatch):
    """Triton launches on the current device, whatever device its tensors are on."""
    done = []
    model = tiny("llama")
    monkeypatch.setenv(prepare.GRAPHS, "0")
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(prepare, "try_kernels", lambda backbone: done.append("kernels") or [])
    prepare.prepare(model, None, torch.device("cuda:1"), 64)
    assert done == [model.device, "kernels"]


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cuda", 3)])
def test_a_failed_capture_gives_its_pool_back_by_number(monkeypatch, device, index):
    """The binding takes an int; a torch.device raised TypeError, which was swallowed."""
    given = []

    def end(number: int, pool: object) -> None:
        assert type(number) is int
        given.append((number, pool))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "next")
    capture = object.__new__(GraphCapture)
    capture._device = torch.device(device)
    capture._stream, capture._pool = object(), "spoilt"
    capture.recover()
    assert given == [(index, "spoilt")] and capture._pool == "next"
