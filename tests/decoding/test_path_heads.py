"""Heads that read the path: each gives the authors' numbers, and plain decoding's text."""

import json
from pathlib import Path

import pytest
import torch
from support import path_head_files, reference_path_heads
from support.families import CONTEXT, VOCABULARY, tiny
from support.followers import CPU, HIDDEN, followed, require_plain_text, write

from medusa_chat.checkpoints.inspection import inspect
from medusa_chat.checkpoints.layouts.drafter_file import Sizes
from medusa_chat.checkpoints.layouts.drafters import drafter_in
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.path_head_weights import read_hydra, read_mlp
from medusa_chat.decoding.budget import WHOLE, Allowance
from medusa_chat.decoding.drafters.drafter import Features
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.decoding.drafters.path_heads import PathHeads
from medusa_chat.errors import ModelError

TOKENS = reference_path_heads.TOKENS
REFERENCE = Path(reference_path_heads.__file__).with_suffix(".json")
KINDS = ("Hydra", "Hydra++", "MLP", "MLP, scaled")


def written(folder, kind, extra=None, file="model.safetensors", **changes):
    """The folder of a drafter of this kind."""
    if kind.startswith("Hydra"):
        tensors = path_head_files.hydra(HIDDEN, VOCABULARY, kind == "Hydra++")
        settings = path_head_files.hydra_config(**changes)
    else:
        tensors = path_head_files.mlp(HIDDEN, VOCABULARY)
        given = {"scale_input": kind == "MLP, scaled"} | changes
        settings = path_head_files.mlp_config(HIDDEN, VOCABULARY, **given)
    return write(folder, tensors | (extra or {}), settings, file)


def model_of(folder, kind, tokens=VOCABULARY):
    read = read_hydra if kind.startswith("Hydra") else read_mlp
    lent = Lent(reference_path_heads.table(), None, reference_path_heads.layer())
    found = drafter_in(LocalFolder(folder))
    return read(found, lent, Sizes(HIDDEN, 2, tokens), CPU, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_each_head_gives_the_authors_numbers(kind, tmp_path):
    model = model_of(written(tmp_path, kind), kind)
    expected = iter(json.loads(REFERENCE.read_text())[kind])
    states = reference_path_heads.states()
    states = model.read(states, model.cache(16))
    text, count = torch.tensor(TOKENS), path_head_files.COUNT
    for level in range(count):  # the reference turns the text around at its end
        rows = len(TOKENS) - count if kind.startswith("MLP") else len(TOKENS)
        after = text if kind.startswith("MLP") else text.roll(-1)
        states, logits = model.step(level, states[:rows], after.roll(-level)[:rows])
        for row in logits[:, :3].tolist():
            assert row == pytest.approx(next(expected), abs=1e-3)


@pytest.mark.parametrize("kind", ["Hydra", "Hydra++", "MLP"])
def test_the_text_is_that_of_plain_decoding(kind, tmp_path):
    read = read_hydra if kind.startswith("Hydra") else read_mlp
    folder = written(tmp_path, kind)
    require_plain_text(followed(tiny("llama"), folder, read, PathHeads))


@pytest.mark.parametrize("kind", KINDS)
def test_after_any_rounds_the_draft_is_that_of_a_fresh_reading(kind, tmp_path):
    model, states = model_of(written(tmp_path, kind), kind), torch.randn(16, HIDDEN)
    drafter, end = PathHeads(model, CONTEXT, VOCABULARY), 4
    drafter.observe(Features(range(4), states[:4]))
    for count in (3, 1, 4):
        drafter.draft(7, 5, Allowance(8, WHOLE))
        drafter.observe(Features(range(count), states[end : end + count]))
        end += count
    drafter.crop(end - 1)
    assert len(drafter.draft(7, 5, Allowance(8, WHOLE)).tree) == 1, "it has no last state"
    drafter.observe(Features([1], states[end - 1 : end]))
    fresh = PathHeads(model, CONTEXT, VOCABULARY)
    fresh.observe(Features(range(end), states[:end]))
    mine, theirs = (one.draft(7, 5, Allowance(8, WHOLE)) for one in (drafter, fresh))
    assert mine.tokens == theirs.tokens and len(mine.tree) == 8 and drafter.length == end
    assert mine.shares[1:] == pytest.approx(theirs.shares[1:], abs=1e-5)


@pytest.mark.parametrize("kind", ["Hydra", "MLP"])
def test_children_depend_on_all_nodes_above_them(kind, tmp_path):
    model = model_of(written(tmp_path, kind), kind)
    drafter, first = PathHeads(model, CONTEXT, VOCABULARY), torch.randn(1, HIDDEN)
    drafter.observe(Features([3], first))
    found = drafter.draft(8, 3, Allowance(30, WHOLE))
    parents = found.tree.parents
    deep = next(n for n in range(1, len(parents)) if found.tree.depths[n] == 3)
    path, states = [8, found.tokens[parents[parents[deep]]], found.tokens[parents[deep]]], first
    for level, token in enumerate(path):
        states, logits = model.step(level, states, torch.tensor([token]))
    expected = float(logits.softmax(-1)[0, found.tokens[deep]])
    assert found.shares[deep] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["Hydra", "MLP"])
@pytest.mark.parametrize("tokens", [VOCABULARY - 8, VOCABULARY + 8])
def test_a_backbone_with_other_padding_is_drafted_for(kind, tokens, tmp_path):
    model = model_of(written(tmp_path, kind), kind, tokens)
    drafter = PathHeads(model, CONTEXT, tokens)
    drafter.observe(Features([tokens - 1], torch.randn(1, HIDDEN)))
    found = drafter.draft(tokens - 1, 3, Allowance(30, WHOLE))
    assert len(found.tree) > 8 and max(found.tokens[1:]) < min(tokens, VOCABULARY)


def test_a_repeated_block_is_in_memory_once_and_tied_heads_may_be_missing(tmp_path):
    folder = written(tmp_path / "a", "Hydra", file="hydra_lm_head.pt")  # as its authors name it
    model = model_of(folder, "Hydra")
    assert len(model.heads[0].blocks) == 1
    tensors = path_head_files.hydra(HIDDEN, VOCABULARY, layers=3)
    tensors["hydra_mlp.0.2.linear.bias"] += 1
    settings = path_head_files.hydra_config()
    other, repeated, _ = model_of(write(tmp_path / "d", tensors, settings), "Hydra").heads
    assert other.blocks[0] is not other.blocks[1] and repeated.blocks[0] is repeated.blocks[1]
    tied = {
        name: tensor
        for name, tensor in path_head_files.mlp(HIDDEN, VOCABULARY).items()
        if ".0." in name or name == "speculator.proj.1.weight"
    }
    settings = path_head_files.mlp_config(HIDDEN, VOCABULARY, tie_weights=True)
    stages = model_of(write(tmp_path / "b", tied, settings), "MLP").stages
    assert stages[0].head is stages[2].head and stages[1].project is stages[2].project
    settings["tie_weights"] = False
    with pytest.raises(ModelError, match=r"lacks emb\.1\.weight"):
        drafter_in(LocalFolder(write(tmp_path / "c", tied, settings)))


@pytest.mark.parametrize(
    ("kind", "extra", "changes", "said"),
    [
        ("Hydra", {}, {"hidden_state_offset": 1}, "read an earlier state"),
        ("Hydra", {"hydra_mlp.0.9.gate.weight": torch.zeros(2)}, {}, "unexpected tensor"),
        ("Hydra", {"hydra_mlp.1.0.linear.weight": torch.zeros(32, 64)}, {}, "was expected"),
        ("Hydra", {"hydra_lm_head.0.weight": torch.zeros(48)}, {}, "is (48,), (n, n) was"),
        ("Hydra", {"hydra_mlp.0.0.linear.bias": torch.zeros(3)}, {}, "bias is (3,), (32,) was"),
        ("Hydra++", {"prefix_embeding_layer.norm.weight": torch.zeros(3)}, {}, "is (3,), (32,)"),
        ("MLP", {"speculator.proj.0.weight": torch.zeros(24)}, {}, "is (24,), (n, n) was"),
        ("MLP", {"speculator.head.0.weight": torch.zeros(24)}, {}, "is (24,), (n, n) was"),
        ("MLP", {"speculator.cell.0.weight": torch.zeros(2)}, {}, "is not an MLP speculator that"),
        ("MLP", {}, {"n_predict": None}, "has n_predict None"),
        ("MLP", {"speculator.proj.1.weight": torch.zeros(24, 32)}, {}, "was expected"),
        ("MLP", {"speculator.ln.0.bias": torch.full((24,), torch.nan)}, {}, "NaN"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(kind, extra, changes, said, tmp_path):
    with pytest.raises(ModelError) as refused:
        model_of(written(tmp_path, kind, extra, **changes), kind)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "label", "noun"),
    [
        ("Hydra++", "Hydra++, 3 heads", "a Hydra++ drafter"),
        ("MLP", "MLP speculator, 3 heads", "an MLP speculator"),
    ],
)
def test_it_is_told_what_it_is_and_needs(kind, label, noun, tmp_path):
    folder = written(tmp_path, kind)
    report = "\n".join(inspect(str(folder)).lines())
    assert label in report and "whose states have 32 numbers and which has 48 tokens" in report
    assert drafter_in(LocalFolder(folder)).noun == noun
    with pytest.raises(ModelError, match="and the backbone has 64 and 48: give the backbone"):
        drafter_in(LocalFolder(folder)).refuse_other(Sizes(64, 2, VOCABULARY))
    with pytest.raises(ModelError, match="and the backbone has 32 and 32,000: give the backbone"):
        drafter_in(LocalFolder(folder)).refuse_other(Sizes(32, 2, 32_000))
