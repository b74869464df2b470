"""Tree: the paper's walkthrough, the published trees, and what must hold for any tree."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import UsageError
from medusa_chat.trees.presets import load_tree
from medusa_chat.trees.shapes import cartesian, chain

# Name -> (nodes of depth 1, 2, 3, 4; leaves), as the reference has them: 63 nodes and the root.
PUBLISHED = {
    "mc_sim_7b_63": ((10, 28, 23, 2), 42),
    "vicuna_7b_stage1": ((10, 32, 20, 1), 44),
    "vicuna_7b_stage1_ablation": ((10, 21, 25, 7), 42),
    "vicuna_7b_stage2": ((10, 23, 23, 7), 42),
    "vicuna_13b_stage1": ((10, 29, 23, 1), 44),
    "vicuna_13b_stage2": ((10, 19, 25, 9), 42),
    "vicuna_33b_stage1": ((10, 34, 19, 0), 46),
    "vicuna_33b_stage2": ((10, 24, 24, 5), 43),
    "zephyr_stage2": ((10, 27, 23, 3), 44),
}


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree of up to 40 nodes: each new node under a node drawn, with a rank still free."""
    parents, ranks = [-1], [-1]
    for node in range(1, draw(st.integers(1, 40))):
        parent = draw(st.integers(0, node - 1))
        taken = {r for p, r in zip(parents, ranks, strict=True) if p == parent}
        parents.append(parent)
        ranks.append(draw(st.integers(0, 60).filter(lambda rank, t=taken: rank not in t)))
    return Tree(tuple(parents), tuple(ranks))


def rows(tree: Tree) -> list[str]:
    return ["".join("01"[seen] for seen in row) for row in tree.ancestors]


def test_walkthrough_of_the_paper() -> None:
    """Medusa, arXiv 2401.10774, section 2.1.2: the top 2 of head 1, then the top 3 of head 2."""
    tree = cartesian(2, 3)
    assert tree.choices == ((), (0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    assert tree.depths == (0, 1, 1, 2, 2, 2, 2, 2, 2)
    assert rows(tree) == [
        "100000000",
        "110000000",
        "101000000",
        "110100000",
        "110010000",
        "110001000",
        "101000100",
        "101000010",
        "101000001",
    ]
    assert [tree.paths[leaf] for leaf in reversed(tree.leaves)] == [
        (0, 2, 8),
        (0, 2, 7),
        (0, 2, 6),
        (0, 1, 5),
        (0, 1, 4),
        (0, 1, 3),
    ]
    # The reference numbers candidates [root, top 10 of head 1, top 10 of head 2].
    flat = [10 * (d - 1) + r + 1 if d else 0 for d, r in zip(tree.depths, tree.ranks, strict=True)]
    assert flat == [0, 1, 2, 11, 12, 13, 11, 12, 13]
    assert tree == load_tree("dense-2-3")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees_have_the_shape_of_the_reference(name: str) -> None:
    tree = load_tree(name)
    by_depth, leaves = PUBLISHED[name]
    counts = Counter(tree.depths)
    assert len(tree) == 64
    assert tuple(counts[depth] for depth in (1, 2, 3, 4)) == by_depth
    assert len(tree.leaves) == leaves
    assert tree.width == 10


def test_chain_is_one_path() -> None:
    assert chain(3).parents == (-1, 0, 1, 2)
    assert chain(3).leaves == (3,)
    assert chain(0) == ROOT


def test_root_alone_is_a_tree() -> None:
    assert (len(ROOT), ROOT.depth, ROOT.width, ROOT.leaves) == (1, 0, 0, (0,))
    assert Tree.from_choices([]) == ROOT


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0, 0]], "comes before its parent"),
        ([[0, 0], [0]], "comes before its parent"),
        ([[]], "comes before its parent"),
        ([[0], [0]], "have the same parent and rank"),
        ([[-1]], "whole numbers"),
        ([[0.5]], "whole numbers"),
        ([[True]], "whole numbers"),
        ([[rank] for rank in range(MAX_NODES)], f"1 to {MAX_NODES} nodes"),
    ],
)
def test_choices_that_are_no_tree_are_refused(choices: list[list[int]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Tree.from_choices(choices)


@pytest.mark.parametrize(
    ("parents", "ranks"),
    [((), ()), ((0,), (-1,)), ((-1,), (0,)), ((-1, 1), (-1, 0)), ((-1, -1), (-1, 0))]
    + [((-1, 0), (-1,)), ((-1, 0), (-1, -1)), ((-1, 0, 0), (-1, 2, 2))],
)
def test_parents_that_are_no_tree_are_refused(
    parents: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError):
        Tree(parents, ranks)


@pytest.mark.parametrize("widths", [(0,), (2, 0), (256,), (16, 16)])
def test_dense_trees_out_of_bounds_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="dense tree"):
        cartesian(*widths)


@given(trees())
def test_mask_row_is_the_ancestors(tree: Tree) -> None:
    for node, row in enumerate(tree.ancestors):
        expected, above = set(), node
        while above >= 0:
            expected.add(above)
            above = tree.parents[above]
        assert {other for other, seen in enumerate(row) if seen} == expected
        assert tree.depths[node] == len(expected) - 1
        assert tree.paths[node] == tuple(sorted(expected))


@given(trees())
def test_choices_bring_the_tree_back(tree: Tree) -> None:
    """In their order, which is that of value: re-sorted by depth, a head would be another tree."""
    assert Tree.from_choices(tree.choices[1:]) == tree


@given(trees(), st.integers(1, 40))
def test_head_of_a_tree_is_a_tree(tree: Tree, nodes: int) -> None:
    cut = tree.head(nodes)
    assert cut.choices == tree.choices[:nodes]
    assert cut.ancestors == tuple(row[:nodes] for row in tree.ancestors[:nodes])


@given(trees(), st.integers(0, 6))
def test_pruned_keeps_the_order_and_drops_the_deep(tree: Tree, depth: int) -> None:
    assert tree.pruned(depth).choices == tuple(c for c in tree.choices if len(c) <= depth)
