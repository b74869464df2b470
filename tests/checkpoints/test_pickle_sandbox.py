"""Bad files of heads: each is refused in one line that names it, and no code in it ever runs."""

import json
import os
import pickle
import shutil
import struct
import zipfile

import pytest
import torch
from fuzz_heads import fuzz
from safetensors.torch import save, save_file
from support.checkpoints import (
    HIDDEN,
    heads_folder,
    layered,
    save_pt,
    with_bias,
    with_own,
    write_checkpoint,
)

from medusa_chat import paths
from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.head_weights import read_heads
from medusa_chat.checkpoints.layouts.headers import parse_header
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.weights import read_config
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

REMEDIES = ("fetch", "give", "use ", "take", "ask", "are allowed", "run git", "leave")
SAFE, PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("gate") / "backbone", heads=0)


@pytest.fixture
def folder(backbone, tmp_path):
    """For heads alone; the backbone that they name is whole."""
    return heads_folder(tmp_path / "heads", base_model_name_or_path=str(backbone))


def refusal(folder):
    """The one line with which these heads are refused before the backbone is read."""
    with pytest.raises(ModelError) as caught:
        found = Checkpoint.find(LoadRequest(str(folder)))
        read_heads(found, read_config(found.backbone))
    return str(caught.value)


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


W = "0.0.linear.weight"
GOOD = with_bias(layered())
ZEROS = bytes(4096)


def without(*prefixes):
    return {n: t for n, t in GOOD.items() if not n.startswith(prefixes)}


def spoiled(value):
    broken = {name: tensor.clone() for name, tensor in GOOD.items()}
    broken["1.0.linear.weight"][3, 5] = value
    return broken


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
    "a header that is no UTF-8": (safetensors(b'{"\xff\xfe": 1}'), "no UTF-8"),
    "a header that is a list": (safetensors([1]), "not a JSON object"),
    "a header nested 100 000 deep": (safetensors(b'{"a":' + b"[" * 100_000), "broken"),
    "a number of 5000 digits": (safetensors(b'{"a":' + b"9" * 5000 + b"}"), "broken"),
    "a name twice": (
        safetensors(f'{{"{W}": {json.dumps(entry())}, "{W}": {json.dumps(entry())}}}'.encode()),
        "twice",
    ),
    "overlapping offsets": (
        safetensors({W: entry(), "1.0.linear.weight": entry()}, ZEROS),
        "overlaps",
    ),
    "a hole": (safetensors({W: entry(start=8, end=4104)}, ZEROS + bytes(8)), "hole"),
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
    "a head left out": (without("1."), "heads 0 to 2 number 1 is missing"),
    "the first head left out": (without("0."), "number 0 is missing"),
    "a layer left out": (
        {n.replace(".0.", ".1."): t for n, t in GOOD.items()},
        "layers 0 to 1 number 0",
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
    "an LM head after no layer": (GOOD | {"0.4.weight": torch.zeros(256, 32)}, "stands at 4"),
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
    "a map without an LM head": (vllm(token_map=torch.arange(8)), "token_map"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_a_file_that_is_no_safetensors_is_refused(name, folder):
    data, says = BAD_BYTES[name]
    (folder / SAFE).write_bytes(data)
    require(refusal(folder), SAFE, says)


@pytest.mark.parametrize("name", BAD_HEADS)
def test_heads_that_are_amiss_are_refused(name, folder):
    heads, says = BAD_HEADS[name]
    save_file(heads, folder / SAFE)
    require(refusal(folder), SAFE, says)


def require(line, file, says):
    """One line, the file's name in it, why, and what to do."""
    assert says in line and file in line, line
    assert "\n" not in line and len(line) < 600
    assert any(remedy in line for remedy in REMEDIES), line


# Pickles.


class Run:
    """Unpickling this runs a command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class Built:
    """Unpickling this sets attributes of an object of its own class."""

    def __init__(self):
        self.value = 1


def archive(file, program, entries=(), compression=zipfile.ZIP_STORED):
    """A zip like torch.save's with any pickle."""
    with zipfile.ZipFile(file, "w", compression) as made:
        made.writestr("archive/data.pkl", program)
        made.writestr("archive/version", "3\n")
        for name, data in entries:
            made.writestr(f"archive/{name}", data)


def rewritten(file, change):
    """The archive with its entries changed: change(name, data) -> data, or None to drop it."""
    with zipfile.ZipFile(file) as old:
        entries = [(name, change(name, old.read(name))) for name in old.namelist()]
    with zipfile.ZipFile(file, "w") as made:
        for name, data in entries:
            if data is not None:
                made.writestr(name, data)


def code_in_zip(file, canary):
    archive(file, pickle.dumps({W: Run(f"touch {canary}")}, protocol=2))


def code_in_a_key(file, canary):
    save_pt(GOOD, file)
    program = pickle.dumps([Run(f"touch {canary}"), {}], protocol=2)
    rewritten(file, lambda name, data: program if name.endswith("data.pkl") else data)


def code_in_raw_pickle(file, canary):
    file.write_bytes(pickle.dumps(Run(f"touch {canary}")))


def code_in_legacy(file, canary):
    torch.save({W: Run(f"touch {canary}")}, file, _use_new_zipfile_serialization=False)


def code_by_eval(file, canary):
    program = b"\x80\x02c__builtin__\neval\nX" + struct.pack("<I", 23)
    archive(file, program + b"__import__('os').abort()" + b"\x85R.")


def code_by_instance(file, canary):
    archive(file, b"(S'touch " + str(canary).encode() + b"'\nios\nsystem\n.")


def code_by_stack_global(file, canary):
    archive(file, pickle.dumps({W: Run(f"touch {canary}")}, protocol=4))


def an_object(file, canary):
    archive(file, pickle.dumps({W: Built()}, protocol=2))


def a_module(file, canary):
    torch.save(torch.nn.Linear(2, 2), file)


def legacy(file, canary):
    torch.save(GOOD, file, _use_new_zipfile_serialization=False)


def bomb(file, canary):
    archive(file, b"x", [("data/0", bytes(50_000_000))], zipfile.ZIP_DEFLATED)


def cut_zip(file, canary):
    save_pt(GOOD, file)
    file.write_bytes(file.read_bytes()[:-100])


def cut_zip_early(file, canary):
    save_pt(GOOD, file)
    file.write_bytes(file.read_bytes()[:2000])


def twice_in_zip(file, canary):
    with pytest.warns(UserWarning, match="Duplicate name"):
        archive(file, pickle.dumps({}, protocol=2), [("data/0", b"a"), ("data/0", b"b")])


def two_programs(file, canary):
    with zipfile.ZipFile(file, "w") as made:
        for name in ("a/data.pkl", "b/data.pkl"):
            made.writestr(name, pickle.dumps({}, protocol=2))


def no_program(file, canary):
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data/0", b"x")


def lying_size(file, canary):
    """The zip directory says that an entry is larger than the file."""
    save_pt(GOOD, file)
    data = bytearray(file.read_bytes())
    place = data.rindex(b"PK\x01\x02")
    data[place + 20 : place + 28] = struct.pack("<II", 2**31, 2**31)
    file.write_bytes(data)


def a_list(file, canary):
    torch.save(list(GOOD.values()), file)


def nested(file, canary):
    torch.save({"state_dict": GOOD}, file)


def numbered(file, canary):
    torch.save({0: GOOD[W]}, file)


def text_beside(file, canary):
    torch.save(GOOD | {"note": "hello"}, file)


def one_number_repeated(file, canary):
    torch.save({W: torch.zeros(1).expand(1_000_000, 1_000_000)}, file)


def transposed(file, canary):
    torch.save(GOOD | {W: GOOD[W].T}, file)


def every_second(file, canary):
    torch.save(GOOD | {W: torch.zeros(64, 32)[::2]}, file)


def storage_cut(file, canary):
    save_pt(GOOD, file)
    rewritten(file, lambda name, data: data[:64] if name.endswith("data/0") else data)


def storage_missing(file, canary):
    save_pt(GOOD, file)
    rewritten(file, lambda name, data: None if name.endswith("data/0") else data)


def sparse(file, canary):
    torch.save({W: torch.eye(32).to_sparse()}, file)


def meta(file, canary):
    torch.save({W: torch.zeros(32, 32, device="meta")}, file)


def complex_numbers(file, canary):
    torch.save({W: torch.zeros(32, 32, dtype=torch.complex64)}, file)


def quantised(file, canary):
    torch.save({W: torch.quantize_per_tensor(GOOD[W], 0.1, 0, torch.qint8)}, file)


def eight_bits(file, canary):
    torch.save({n: t.to(torch.float8_e4m3fn) for n, t in GOOD.items()}, file)


def whole_numbers(file, canary):
    torch.save({n: t.long() for n, t in GOOD.items()}, file)


def marked(file, canary):
    tensor = GOOD[W].clone()
    tensor.note = "x"
    torch.save(GOOD | {W: tensor}, file)


def long_program(file, canary):
    archive(file, pickle.dumps({W: "x" * 5_000_000}, protocol=2))


def deep_program(file, canary):
    archive(file, b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".")


def broken_program(file, canary):
    archive(file, b"\x80\x02}q\x00X\xff\xff\xff\x7f")


def empty_program(file, canary):
    archive(file, b"")


def self_reference(file, canary):
    archive(file, b"\x80\x02}q\x00(X\x01\x00\x00\x00ah\x00u.")


def big_endian(file, canary):
    save_pt(GOOD, file)
    rewritten(file, lambda name, data: b"big" if name.endswith("byteorder") else data)


def scripted(file, canary):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)


def seven_zip(file, canary):
    file.write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(100))


def wrong_hidden(file, canary):
    save_pt({f"{h}.0.linear.weight": torch.zeros(8, 8) for h in range(2)}, file)


BAD_PICKLES = {
    code_in_zip: "asks to run 'posix system'",
    code_in_a_key: "asks to run 'posix system'",
    code_in_raw_pickle: "not a torch.save archive",
    code_in_legacy: "not a torch.save archive",
    code_by_eval: "asks to run '__builtin__ eval'",
    code_by_instance: "does more than list tensors",
    code_by_stack_global: "asks to run 'posix system'",
    an_object: "asks to run",
    a_module: "asks to run",
    legacy: "before torch 1.6",
    bomb: "compressed",
    cut_zip: "cut short",
    cut_zip_early: "cut short",
    twice_in_zip: "two of one name",
    two_programs: "exactly one data.pkl",
    no_program: "exactly one data.pkl",
    lying_size: "",
    a_list: "holds a list",
    nested: "'state_dict' is not a tensor",
    numbered: "'0' is not a tensor",
    text_beside: "'note' is not a tensor",
    one_number_repeated: "row by row",
    transposed: "row by row",
    every_second: "row by row",
    storage_cut: "larger than its values",
    storage_missing: "no values",
    sparse: "asks to run",
    meta: "asks to run",
    complex_numbers: "asks to run",
    quantised: "asks to run",
    eight_bits: "FP8, which cannot be used",
    whole_numbers: "I64",
    marked: "",
    long_program: "at most 4000000 bytes",
    deep_program: "",
    broken_program: "broken or cut short",
    empty_program: "broken or cut short",
    self_reference: "'a' is not a tensor",
    big_endian: "big-endian",
    scripted: "",
    seven_zip: "not a torch.save archive",
    wrong_hidden: "hidden size 8",
}


@pytest.mark.parametrize("write", BAD_PICKLES, ids=lambda write: write.__name__)
def test_a_bad_pickle_is_refused_without_running(write, folder, tmp_path):
    canary = tmp_path / "canary"
    write(folder / PICKLED, canary)
    require(refusal(folder), PICKLED, BAD_PICKLES[write])
    assert not canary.exists()
    assert not any(paths.cache_dir().rglob("*.safetensors"))


def test_code_would_run_without_the_gate(tmp_path):
    """The canary is a canary: plain unpickling touches it."""
    canary = tmp_path / "canary"
    code_in_raw_pickle(tmp_path / "file", canary)
    getattr(pickle, "loads")((tmp_path / "file").read_bytes())  # noqa: B009
    assert canary.exists()


# What only the child sees.


def job(file, target, finite=True):
    return pickle_sandbox.Job(
        ((file, target, pickle_sandbox.plain(pickle_sandbox.checked_header(file))),), finite
    )


def test_the_child_refuses_what_its_header_hides(tmp_path):
    """NaN, values shared too often, a list that says otherwise, a file that is gone."""
    files = {name: tmp_path / f"{name}.pt" for name in ("good", "nan", "shared", "gone", "other")}
    save_pt(GOOD, files["good"])
    save_pt(spoiled(torch.nan), files["nan"])
    once = torch.zeros(64, 64)
    save_pt({f"{h}.0.linear.weight": once for h in range(16)}, files["shared"])
    save_pt(GOOD, files["gone"])
    save_pt(GOOD, files["other"])
    jobs = [job(file, tmp_path / f"{name}.safetensors") for name, file in files.items()]
    files["gone"].write_bytes(files["gone"].read_bytes()[:500])
    save_pt({W: torch.zeros(2, 2)}, files["other"])
    problems = dict(zip(files, pickle_sandbox.run(jobs), strict=True))
    assert problems["good"] is None
    assert "'1.0.linear.weight' holds NaN" in problems["nan"]
    assert "share values" in problems["shared"]
    assert "torch cannot read it" in problems["gone"]
    assert "other tensors" in problems["other"]


def test_a_child_that_dies_is_named_and_the_rest_goes_on(tmp_path, monkeypatch):
    for name in ("first", "second", "third"):
        save_pt(GOOD, tmp_path / f"{name}.pt")
    monkeypatch.setattr(pickle_sandbox, "STARTUP", 300)
    jobs = [job(tmp_path / f"{n}.pt", tmp_path / f"{n}.out") for n in ("first", "second", "third")]
    answers = iter([([None], "ended with code -11"), ([None], "ended with code 0")])
    monkeypatch.setattr(pickle_sandbox, "_run_child", lambda rest: next(answers))
    first, second, third = pickle_sandbox.run(jobs)
    assert first is None and third is None and "code -11" in second


def test_a_bad_value_leaves_no_file_in_the_cache(folder):
    save_pt(spoiled(torch.inf), folder / PICKLED)
    require(refusal(folder), PICKLED, "NaN or infinity")
    kept = [f for f in (paths.cache_dir() / "converted").iterdir() if f.name != "known"]
    assert kept == []


def test_a_full_disk_is_said_before_anything_is_written(folder, monkeypatch):
    save_pt(GOOD, folder / PICKLED)
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(pickle_sandbox.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ModelError, match="free some, or set --data-dir"):
        pickle_sandbox.convert([folder / PICKLED], finite=True)


# The folder itself.


def test_a_loop_of_links_and_a_dead_link_are_refused(folder):
    (folder / SAFE).symlink_to(folder / SAFE)
    require(refusal(folder), SAFE, "broken link")
    (folder / SAFE).unlink()
    (folder / SAFE).symlink_to("/no/such/file")
    require(refusal(folder), SAFE, "broken link")


def test_a_folder_in_the_place_of_the_file_is_no_heads(folder):
    (folder / SAFE).mkdir()
    assert "no heads" in refusal(folder) or "no weights" in refusal(folder)


def test_a_pipe_in_the_place_of_the_file_does_not_hang(folder):
    os.mkfifo(folder / SAFE)
    require(refusal(folder), SAFE, "no file that can be read")


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


def test_own_header_reader_takes_what_the_library_writes(tmp_path):
    data = save({"x": torch.zeros(2, 3), "y": torch.zeros((), dtype=torch.bfloat16)})
    length = int.from_bytes(data[:8], "little")
    header = parse_header(data[8 : 8 + length], len(data) - 8 - length)
    assert {n: (e.dtype, e.shape) for n, e in header.items()} == {
        "x": ("F32", (2, 3)),
        "y": ("BF16", ()),
    }


def test_two_hundred_mutated_files_are_taken_or_refused_in_one_line(tmp_path):
    tally = fuzz(200, seed=7, folder=tmp_path)
    assert tally.failures == []
    assert tally.files == 200 == tally.refused + tally.taken
    assert tally.refused > 50 and tally.taken > 10
