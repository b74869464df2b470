"""Passes of one number of rows: the same text, and in half precision the same rounding."""

import pytest
import torch
from support.engines import Oracle, engine_of, tokens
from support.families import CONTEXT, VOCABULARY, tiny
from support.graphs import answer, assert_same, settings_of
from support.graphs import tokens as said

from medusa_chat.checkpoints import prepare
from medusa_chat.decoding import attention
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.backends.torch_step import TorchStep
from medusa_chat.decoding.drafters import TreeTensors
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.fused_layers import replace_submodules
from medusa_chat.decoding.padded_rows import filled, widened
from medusa_chat.decoding.step_profiler import time_steps
from medusa_chat.decoding.tree import ROOT, cartesian, chain
from medusa_chat.errors import UsageError

CPU = torch.device("cpu")
TREES = (ROOT, chain(3), cartesian(3, 2))  # 1, 4 and 10 nodes


def steady_of(family: str, rows: int, dtype=torch.float32):
    """An engine with merged layers whose steps have a multiple of `rows` rows, and how many the
    passes had."""
    model = tiny(family).to(dtype)
    replace_submodules(model, packs=False)
    engine = engine_of(model, attention.STEADY if rows > 1 else attention.NAME)
    engine.backbone.rows = rows
    counts, run = [], engine.backbone.run_fixed

    def counted(found, *arguments):
        counts.append(len(found))
        return run(found, *arguments)

    engine.backbone.run_fixed = counted
    return engine, counts


@pytest.mark.parametrize("tree", TREES, ids=len)
def test_rows_beside_a_tree_are_seen_by_none_of_its_nodes(tree):
    own, n = TreeTensors.of(tree, CPU), len(tree)
    wide, tensors = widened(tree, own, 8)
    assert len(wide) % 8 == 0 and len(wide) - n < 8
    assert not tensors.ancestors[:n, n:].any()
    assert torch.equal(tensors.ancestors[:n, :n], own.ancestors)
    assert tensors.depths.tolist() == [*tree.depths, *[0] * (len(wide) - n)]
    ids = torch.arange(5, 5 + n)
    assert filled(ids, len(wide)).tolist() == [*ids.tolist(), *[5] * (len(wide) - n)]
    beside = tensors.ancestors[n:]
    assert torch.equal(beside, torch.eye(len(wide), dtype=torch.bool)[n:])
    assert widened(wide, tensors, 8)[0] is wide


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2", "gemma3"])
def test_the_text_and_its_figures_are_the_same(family, temperature, is_recorded):
    settings = settings_of(temperature=temperature)
    engine, _ = steady_of(family, 1)
    wanted = [answer(engine, None, tree, settings) for tree in TREES]
    engine, counts = steady_of(family, 8)
    for tree, events in zip(TREES, wanted, strict=True):
        way = CudaGraphStep(engine.backbone) if is_recorded else None
        counts.clear()
        assert_same(answer(engine, way, tree, settings), events)
        assert way is None or way.seconds > 0, "nothing was recorded"
        steps = counts[1:]  # behind the prompt's
        assert steps and {count % 8 for count in steps} == {0}
        assert max(steps) == -(-len(tree) // 8) * 8


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_answer_goes_as_far_as_the_context(family):
    engine, _ = steady_of(family, 64)
    events = answer(engine, None, chain(3), settings_of(max_new_tokens=2 * CONTEXT))
    assert events[-1].reason == "context"
    assert said(events) == said(answer(engine, None, ROOT, settings_of(max_new_tokens=2 * CONTEXT)))


def parted(rows: int) -> int:
    """Of twelve answers in bf16 with a tree those that are not plain decoding's."""
    found = 0
    for seed in range(6):
        engine, _ = steady_of("llama", rows, torch.bfloat16)
        prompt = [(7 * i + seed) % VOCABULARY for i in range(9)]
        plain = tokens(engine, prompt, max_new_tokens=80)
        for tree in (chain(3), cartesian(2, 2, 2)):
            oracle = Oracle(plain, tree)
            oracle.seen = -len(prompt)
            engine.forget()
            found += tokens(engine, prompt, oracle, max_new_tokens=80) != plain
    return found


def test_products_that_round_by_their_rows_part_no_text(monkeypatch):
    """As a GPU's do: here every linear's result is a little larger the more rows it has."""
    stock = torch.nn.Linear.forward

    def rounded(linear, x):
        return stock(linear, x) * (1 + (x.shape[-2] % 13) / 256)

    monkeypatch.setattr(torch.nn.Linear, "forward", rounded)
    assert parted(1) > 6, "it would be seen"
    assert parted(16) == 0


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_its_attention_is_ours_with_sums_in_fp64(rows, dtype):
    torch.manual_seed(rows)
    query, key, value = (
        torch.randn(1, h, n, 16, dtype=dtype) for h, n in ((6, rows), *[(2, 340)] * 2)
    )
    mask = torch.zeros(1, 1, rows, 340, dtype=dtype)
    mask[..., 320:].masked_fill_(torch.rand(rows, 20) < 0.5, -torch.inf)
    ours = attention.steady_attention(query, key, value, mask, 0.2)
    wanted = attention.tree_attention(*(t.float() for t in (query, key, value, mask)), 0.2)
    assert ours.dtype == dtype
    torch.testing.assert_close(
        ours.float(), wanted, rtol=0, atol=1e-5 if dtype.itemsize == 4 else 2e-3
    )


@pytest.mark.parametrize(("asked", "rows"), [("", 1), ("0", 1), ("1", 1), ("64", 64)])
def test_they_are_asked_for_by_the_environment(monkeypatch, asked, rows):
    monkeypatch.setenv(prepare.STEADY, asked)
    assert prepare._padded_rows() == rows


@pytest.mark.parametrize("is_spread", [False, True])
def test_where_they_are_left_out_it_is_said(monkeypatch, is_spread):
    monkeypatch.setenv(prepare.STEADY, "64")
    backend, notes = prepare.prepare(tiny("llama"), None, CPU, CONTEXT, is_spread=is_spread)
    backbone = backend.backbone
    assert backbone.rows == 1 and backbone.implementation == attention.NAME
    assert (
        notes[0] == "MEDUSA_CHAT_STEADY is ignored: it works only with a model on one CUDA device"
    )


@pytest.mark.parametrize(
    ("family", "implementation", "words"),
    [
        ("llama", attention.STEADY, "rounds as plain decoding does"),
        ("mixtral", attention.STEADY, "experts may still"),
        ("llama", "eager", "family may still"),
    ],
)
def test_it_is_said_what_they_bring(family, implementation, words):
    assert words in prepare._rounding(Backbone(tiny(family), CONTEXT, implementation))


@pytest.mark.parametrize("asked", ["many", "-1", "512", "96", "1.5", "²", "9" * 5000])
def test_what_is_no_number_of_rows_is_refused(monkeypatch, asked):
    monkeypatch.setenv(prepare.STEADY, asked)
    with pytest.raises(UsageError, match="number that divides"):
        prepare._padded_rows()


def test_measuring_leaves_the_cache_as_it_was():
    """A step writes all its rows behind the text it is rehearsed with."""
    engine, _ = steady_of("llama", 64)
    engine.backbone = Backbone(engine.backbone.model, 400, attention.STEADY)
    engine = Engine(TorchStep(engine.backbone), engine.heads)
    engine.backbone.rows = 64
    text = [(7 * i + 3) % VOCABULARY for i in range(350)]
    list(engine.generate(text, engine.drafter(settings_of(), ROOT), settings_of(max_new_tokens=2)))
    before = engine.backbone.cache.rows(0, 350)
    *_, costs = time_steps(engine, cartesian(3, 2), 0.01)
    assert costs is not None
    for old, new in zip(before, engine.backbone.cache.rows(0, 350), strict=True):
        assert torch.equal(old, new)
