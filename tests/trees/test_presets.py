"""Trees by name and by file: what ships is whole, what the user brings is read or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError
from medusa_chat.trees import presets
from medusa_chat.trees.presets import load_tree, tree_names
from medusa_chat.trees.shapes import cartesian, chain

EXPECTED = Tree((-1, 0, 0, 1), (-1, 0, 1, 0))


def saved(folder: Path, value: Any) -> str:
    file = folder / "tree.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("name", tree_names())
def test_every_preset_is_a_tree_and_says_where_it_is_from(name: str) -> None:
    values = json.loads(presets.paths.preset("trees", f"{name}.json").read_text("utf-8"))
    assert values["name"] == name
    assert values.get("source") or values.get("note")
    assert len(load_tree(name)) == len(values["choices"]) + 1


def test_presets_of_the_small_trees() -> None:
    assert load_tree("chain-3") == chain(3)
    assert load_tree("chain-5") == chain(5)
    assert load_tree("dense-2-2") == cartesian(2, 2)
    for nodes in (8, 16, 32):
        assert load_tree(f"sparse-{nodes}") == load_tree("mc_sim_7b_63", nodes)
    assert "auto" not in tree_names()


@pytest.mark.parametrize(
    "value",
    [
        [[0], [1], [0, 0]],
        {"choices": [[0], [1], [0, 0]]},
        {"name": "mine", "choices": [[0], [1], [0, 0]], "unknown": 1},
        "\ufeff[[0], [1], [0, 0]]",
    ],
)
def test_files_in_every_form(tmp_path: Path, value: Any) -> None:
    assert load_tree(saved(tmp_path, value)) == EXPECTED


@pytest.mark.parametrize(
    "value",
    [
        *("", "{", "[1", "NaN", "9" * 5000, "[" * 100_000, '{"choices":' * 50_000),
        *(None, 1, "text", True, [0], [None], [["0"]], [[0.0]], [[True]], [[-1]], [[[0]]]),
        *([[0], [0]], [[0, 0]], [[]], [[10**30]], [[rank % 256] for rank in range(400)]),
        *({}, {"choices": None}, {"choices": {}}, {"choices": "[[0]]"}),
    ],
)
def test_files_that_hold_no_tree_are_refused_in_one_line(tmp_path: Path, value: Any) -> None:
    text = value if isinstance(value, str) and value != "text" else json.dumps(value)
    with pytest.raises(UsageError) as refusal:
        load_tree(saved(tmp_path, text))
    assert "tree.json" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_any_json_is_a_tree_or_refused(value: Any) -> None:
    for candidate in (value, {"choices": value}):
        try:
            assert isinstance(presets._tree(candidate), Tree)
        except UsageError:
            pass


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "big.json").write_text(" " * presets.MAX_BYTES + "[[0]]")
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    for name, word in (("big.json", "larger than 1 MB"), ("latin.json", "not JSON")):
        with pytest.raises(UsageError, match=word):
            load_tree(str(tmp_path / name))


@pytest.mark.parametrize("name", ["", "nope", "a\0b", "x" * 5000, "../trees/chain-3", "/", "."])
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match="one of auto, chain-3.*zephyr_stage2"):
        load_tree(name)


@pytest.mark.parametrize("nodes", [0, -1, 65, 10**9])
def test_more_nodes_than_the_tree_has_are_refused(nodes: int) -> None:
    with pytest.raises(UsageError, match="mc_sim_7b_63 allows 1 to 64 nodes"):
        load_tree("mc_sim_7b_63", nodes)
