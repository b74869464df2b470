"""A split GGUF file is the file that it was split from, by whichever part it is named."""

import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_heads
from support.gguf_models import tiny_model, write_gguf
from support.loading import answer

from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.gguf_rows import FileRows
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.inspection import inspect
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.weights import config_of, read_model
from medusa_chat.cli.main import main
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.messages import LoadRequest

PARTS = 5  # of the tiny model with five tensors each; one more where the first has none


def found_in(path: Path) -> Checkpoint:
    """The file with the folder of its settings."""
    return with_settings(Checkpoint.find(LoadRequest(str(path))))


def parts(path: Path) -> list[Path]:
    return sorted(path.parent.glob("a-*.gguf"))


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The first part."""
    return write_gguf(tmp_path / "split" / "a.gguf", tiny_model(), "Q4_1", split=5)


@pytest.mark.parametrize("is_first_small", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_its_weights_are_to_the_bit_those_of_the_whole_file(
    family: str, is_first_small: bool, tmp_path: Path
) -> None:
    model = tiny_model(family)
    whole = write_gguf(tmp_path / "whole" / "a.gguf", model, "Q4_1")
    first = write_gguf(
        tmp_path / "split" / "a.gguf", model, "Q4_1", split=5, is_first_small=is_first_small
    )
    assert len(parts(first)) == -(-len(list(model.parameters())) // 5) + is_first_small > 3
    both = [found_in(path) for path in (whole, first)]
    states = [read_model(f, config_of(f), "bf16", torch.device("cpu")).state_dict() for f in both]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert len({(found.settings / name).read_bytes() for found in both}) == 1
    rows = [FileRows(GgufWeights.of(found)) for found in both]
    names = [name for name in states[0] if rows[0].is_in_blocks(name)]
    assert names and rows[0].bytes == rows[1].bytes
    for name in names:
        values = [some.rows(name).whole().values() for some in rows]
        assert torch.equal(*values)


def test_every_part_and_the_folder_name_the_same_settings(split: Path) -> None:
    found = {found_in(path).settings for path in (*parts(split), split.parent)}
    assert len(parts(split)) == PARTS and len(found) == 1
    assert main(["models", "rm", str(parts(split)[2])]) == 0
    assert not found.pop().exists() and len(parts(split)) == PARTS


def test_settings_are_written_anew_when_any_part_has_changed(split: Path) -> None:
    before = found_in(split).settings
    write_gguf(split.parent / "a.gguf", tiny_model(seed=1), "Q4_1", split=5)
    for path in parts(split)[:-1]:
        shutil.copystat(before.parent, path)
    assert found_in(split).settings != before and not before.exists()


def test_it_answers_with_heads_and_all_its_bytes_are_counted(split: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    heads.mkdir()
    write_heads(heads, MedusaHeads(3, 32))
    request = LoadRequest(str(heads), backbone=str(parts(split)[1]), precision="fp32")
    (*_, (_, loaded)) = load(request)
    plain = answer(loaded, drafter="none")[-1].token_ids
    assert answer(loaded, drafter="medusa")[-1].token_ids == plain
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model(), "Q4_1")
    one, several = inspect(str(whole)), inspect(str(parts(split)[3]))
    assert several.backbone_bytes == sum(path.stat().st_size for path in parts(split))
    assert (one.parameters, one.memory, one.stored) == (
        several.parameters,
        several.memory,
        several.stored,
    )
    assert several.is_here and not several.problems


def refused(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a load and `inspect` say."""
    assert main(["generate", "--backbone", name, "--prompt", "a", "--device", "cpu"]) == 4
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert main(["inspect", name]) == 4
    assert said.removeprefix("medusa-chat: ") in capsys.readouterr().err
    assert not kept_copies.kept()
    return said


@pytest.mark.parametrize("number", [0, 1, PARTS - 1])
def test_a_missing_part_is_named(
    number: int, split: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = parts(split)[number]
    gone.unlink()
    for name in (parts(split)[2], split.parent):
        said = refused(str(name), capsys)
        assert f"{gone} is missing, part {number + 1} of {PARTS}: fetch it too" in said


def renamed(path: Path, one: bytes, other: bytes) -> bytes:
    return path.read_bytes().replace(one, other)


def test_a_part_of_another_file_is_named(split: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second, third = parts(split)[1:3]
    second.write_bytes(third.read_bytes())
    assert f"{second} says that it is part 3 of 5" in refused(str(split), capsys)
    other = write_gguf(split.parent / "b.gguf", tiny_model("qwen2"), "Q4_1", split=6)
    second.write_bytes(other.with_name(other.name.replace("00001", "00002")).read_bytes())
    assert f"{second} holds the tensor 'blk." in refused(str(split), capsys)
    second.write_bytes(renamed(second, b"blk.", b"BLK."))
    assert f"{split} is of a file with 21 tensors, and its parts here have 22" in refused(
        str(split), capsys
    )


def test_a_part_under_another_name_is_told(
    split: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone.gguf"
    shutil.copy(split, alone)
    assert f"{alone} says that it is part 1 of 5: give it its own name" in refused(
        str(alone), capsys
    )
    for number in (1, 2):
        shutil.copy(
            write_gguf(tmp_path / "whole.gguf", tiny_model()),
            tmp_path / f"c-0000{number}-of-00002.gguf",
        )
    said = refused(str(tmp_path / "c-00001-of-00002.gguf"), capsys)
    assert "says that it is no part of a split file" in said
