"""Bad files and folders of heads: each is refused in one line that names it."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from fuzz_heads import fuzz
from safetensors.torch import save, save_file
from support.bad_heads import GOOD, SAFE, W, refusal, require, spoiled
from support.checkpoints import (
    HIDDEN,
    heads_folder,
    layered,
    with_own,
)

from medusa_chat.checkpoints.inspection import inspect, open_anywhere
from medusa_chat.checkpoints.layouts.headers import parse_header, read_header
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.errors import ModelError

ZEROS = bytes(4096)


def written(heads, change=None):
    """A safetensors file of heads, its bytes changed."""
    data = save(heads)
    return change(data) if change else data


def safetensors(header, data=b"", length=None):
    """A safetensors file of any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape=(32, 32), start=0, end=4096, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def without(*prefixes):
    return {n: t for n, t in GOOD.items() if not n.startswith(prefixes)}


def own(rows):
    return with_own(layered(), torch.zeros(rows, HIDDEN))


def vllm(**more):
    weights = {h: GOOD[f"{h}.0.linear.weight"].clone() for h in range(3)}
    return {f"blocks.{h}.layers.0.weight": tensor for h, tensor in weights.items()} | more


BAD_BYTES = {
    "an empty file": (b"", "is empty"),
    "seven bytes": (b"1234567", "cut short"),
    "cut in the data": (written(GOOD)[:-300], "need"),
    "cut in the header": (written(GOOD)[:60], "cut short"),
    "bytes at the end": (written(GOOD) + b"x", "need"),
    "a header length of 2**63": (safetensors({}, length=2**63), "cut short"),
    "a header longer than the file": (safetensors({}, length=500), "cut short"),
    "a header that is no JSON": (safetensors(b"{nonsense}"), "not valid JSON"),
    "a header that is no UTF-8": (safetensors(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "a header that is a list": (safetensors([1]), "not a JSON object"),
    "a header nested 100 000 deep": (safetensors(b'{"a":' + b"[" * 100_000), "broken"),
    "a number of 5000 digits": (safetensors(b'{"a":' + b"9" * 5000 + b"}"), "broken"),
    "a name twice": (
        safetensors(f'{{"{W}": {json.dumps(entry())}, "{W}": {json.dumps(entry())}}}'.encode()),
        "duplicate",
    ),
    "overlapping offsets": (
        safetensors({W: entry(), "1.0.linear.weight": entry()}, ZEROS),
        "overlaps",
    ),
    "a hole": (safetensors({W: entry(start=8, end=4104)}, ZEROS + bytes(8)), "gap"),
    "a negative offset": (safetensors({W: entry(start=-8, end=4088)}, ZEROS), "offsets"),
    "offsets that end before they start": (safetensors({W: entry(start=9, end=1)}), "size"),
    "a shape of 2**47": (safetensors({W: entry(shape=(2**47, 2**47))}, ZEROS), "size"),
    "a shape of True": (safetensors({W: entry(shape=(True, 1))}, ZEROS), "shape"),
    "a shape of nine dimensions": (safetensors({W: entry(shape=[1] * 9)}, ZEROS), "shape"),
    "another size than its shape": (safetensors({W: entry(shape=(32, 31))}, ZEROS), "size"),
    "an unknown dtype": (safetensors({W: entry(dtype="F99")}, ZEROS), "unknown dtype"),
    "an entry with more in it": (safetensors({W: entry() | {"run": "x"}}, ZEROS), "described"),
    "an entry that is a number": (safetensors({W: 5}, ZEROS), "described"),
    "a web page": (b"<!DOCTYPE html><html>Not found</html>", "web page"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid x", "LFS pointer"),
    "a zip named safetensors": (b"PK\x03\x04" + bytes(100), "cut short"),
    "FP8 heads": (
        safetensors({W: entry(dtype="F8_E4M3", end=1024)}, bytes(1024)),
        "FP8, which cannot be used",
    ),
}
BAD_HEADS = {
    "zero heads": ({}, "holds no tensors"),
    "whole numbers": ({n: t.to(torch.int32) for n, t in GOOD.items()}, "I32"),
    "doubles": ({n: t.double() for n, t in GOOD.items()}, "F64"),
    "NaN": (spoiled(torch.nan), "NaN or infinity"),
    "infinity": (spoiled(torch.inf), "NaN or infinity"),
    "a head left out": (without("1."), "number 1 of heads 0 to 2 is missing"),
    "the first head left out": (without("0."), "number 0 of heads 0 to 2 is missing"),
    "a layer left out": (
        {n.replace(".0.", ".1."): t for n, t in GOOD.items()},
        "number 0 of layers 0 to 1",
    ),
    "uneven layers": (
        GOOD | {"2.1.linear.weight": GOOD[W].clone()},
        "its heads have 1, 2 layers",
    ),
    "head number 999": (GOOD | {"999.0.linear.weight": GOOD[W].clone()}, "up to number 999"),
    "seventeen heads": (layered(heads=17), "1 to 16 are allowed"),
    "seventeen layers": (layered(layers=17, heads=1), "1 to 16 are allowed"),
    "another hidden size": (
        {f"{h}.0.linear.weight": torch.zeros(16, 16) for h in range(3)},
        "hidden size 16 and the backbone has 32",
    ),
    "a vocabulary too small": (own(200), "for 200 tokens and the backbone has 256"),
    "a vocabulary far too large": (own(4000), "for 4000 tokens and the backbone has 256"),
    "an LM head for some": (GOOD | {"1.1.weight": torch.zeros(256, 32)}, "1 of 3 heads"),
    "an LM head after no layer": (GOOD | {"0.4.weight": torch.zeros(256, 32)}, "is at 4"),
    "a layer that is not square": (GOOD | {W: torch.zeros(32, 31)}, "is (32,), not (31,)"),
    "a bias of another size": (GOOD | {"1.0.linear.bias": torch.zeros(7)}, "is (7,)"),
    "a bias without its layer": (GOOD | {"1.1.linear.bias": torch.zeros(32)}, "has no weight"),
    "a scalar": (GOOD | {W: torch.tensor(1.0)}, "is out of range"),
    "an empty tensor": ({W: torch.zeros(0, 0)}, "hidden size 0"),
    "an unknown tensor": (GOOD | {"extra": torch.zeros(3)}, "unexpected tensor 'extra'"),
    "a whole other model": ({"model.embed.weight": torch.zeros(3, 3)}, "unexpected tensor"),
    "two namings": (GOOD | vllm(), "mixes the names"),
    "one part twice": (
        GOOD | {f"medusa_head.{W}": GOOD[W].clone()},
        "are the same part",
    ),
    "quantised heads": (GOOD | {"0.0.linear.weight_scale": torch.ones(1)}, "quantised heads"),
    "a short vocabulary without a map": (
        vllm(**{"lm_head.weight": torch.zeros(100, 32)}),
        "for 100 tokens and the backbone has 256",
    ),
    "a map beyond the vocabulary": (
        vllm(**{"lm_head.weight": torch.zeros(9, 32), "token_map": torch.arange(250, 259)}),
        "token map",
    ),
    "a map with one token twice": (
        vllm(**{"lm_head.weight": torch.zeros(9, 32), "token_map": torch.zeros(9).long()}),
        "token map",
    ),
    "a map of another length": (
        vllm(**{"lm_head.weight": torch.zeros(9, 32), "token_map": torch.arange(8)}),
        "'token_map' is (8,)",
    ),
    "a map without an LM head": (vllm(token_map=torch.arange(8)), "no LM head"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_a_file_that_is_no_safetensors_is_refused(name, lone_heads):
    data, says = BAD_BYTES[name]
    (lone_heads / SAFE).write_bytes(data)
    require(refusal(lone_heads), SAFE, says)


@pytest.mark.parametrize("name", BAD_HEADS)
def test_heads_that_are_amiss_are_refused(name, lone_heads):
    heads, says = BAD_HEADS[name]
    save_file(heads, lone_heads / SAFE)
    require(refusal(lone_heads), SAFE, says)


# The folder itself.


def test_a_loop_of_links_and_a_dead_link_are_refused(lone_heads):
    (lone_heads / SAFE).symlink_to(lone_heads / SAFE)
    require(refusal(lone_heads), SAFE, "broken link")
    (lone_heads / SAFE).unlink()
    (lone_heads / SAFE).symlink_to("/no/such/file")
    require(refusal(lone_heads), SAFE, "broken link")


def test_a_folder_in_the_place_of_the_file_is_no_heads(lone_heads):
    (lone_heads / SAFE).mkdir()
    assert "no heads" in refusal(lone_heads) or "no weights" in refusal(lone_heads)


def test_a_pipe_in_the_place_of_the_file_does_not_hang(lone_heads):
    os.mkfifo(lone_heads / SAFE)
    require(refusal(lone_heads), SAFE, "not a readable file")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"a": "../../etc/passwd.bin"}, "no valid weight_map"),
        ({"a": 5}, "no valid weight_map"),
        ([], "no valid weight_map"),
        ({"medusa_head.0.0.linear.weight": "model-00001-of-00002.safetensors"}, "lacks model-0000"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(table, says, backbone, tmp_path):
    folder = shutil.copytree(
        backbone, tmp_path / "whole", ignore=shutil.ignore_patterns("*.safetensors")
    )
    index = {"metadata": {}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    assert says in refusal(folder)


@pytest.mark.parametrize("base", ["../../../etc", "/etc/passwd", "http://x/y", "a b/c", "x" * 500])
def test_a_base_that_is_no_id_and_no_folder_is_refused(base, tmp_path):
    folder = heads_folder(tmp_path / "deep" / "heads", base_model_name_or_path=base)
    save_file(GOOD, folder / SAFE)
    line = refusal(folder)
    assert "--backbone" in line and "\n" not in line and len(line) < 400


@pytest.mark.parametrize(
    "base", [r"\\evil\share\x", "//evil/share/x", r"\/evil/x", r"\??\UNC\evil"]
)
def test_a_share_of_the_network_that_a_checkpoint_names_is_never_looked_at(
    base, tmp_path, monkeypatch
):
    looked, is_dir = [], Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: (looked.append(str(path)), is_dir(path))[1])
    folder = heads_folder(tmp_path / "heads", base_model_name_or_path=base)
    save_file(GOOD, folder / SAFE)
    assert "give --backbone" in refusal(folder)
    assert "give --backbone" in inspect(str(folder), None, None, open_anywhere).problems[0]
    assert looked and not any("evil" in path for path in looked)


def test_own_header_reader_takes_what_the_library_writes(tmp_path):
    data = save({"x": torch.zeros(2, 3), "y": torch.zeros((), dtype=torch.bfloat16)})
    length = int.from_bytes(data[:8], "little")
    header = parse_header(data[8 : 8 + length], len(data) - 8 - length)
    assert {n: (e.dtype, e.shape) for n, e in header.items()} == {
        "x": ("F32", (2, 3)),
        "y": ("BF16", ()),
    }


def test_two_hundred_mutated_files_are_taken_or_refused_in_one_line(tmp_path):
    counts = fuzz(200, seed=7, folder=tmp_path)
    assert counts.failures == []
    assert counts.files == 200 == counts.refused + counts.taken
    assert counts.refused > 50 and counts.taken > 10


def test_a_header_of_more_than_it_may_have_is_not_read(tmp_path):
    """The whole file holds it."""
    file = tmp_path / SAFE
    file.write_bytes(safetensors({}, length=40_000_000))
    os.truncate(file, 50_000_000)
    with pytest.raises(ModelError, match="does not fit"):
        read_header(LocalFolder(tmp_path), SAFE)
