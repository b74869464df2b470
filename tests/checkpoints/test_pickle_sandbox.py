"""Bad pickles of heads: each is refused in one line that names it, and no code in it ever runs."""

import os
import pickle
import shutil
import struct
import subprocess
import zipfile

import pytest
import torch
from support.bad_heads import GOOD, PICKLED, W, refusal, require, spoiled
from support.checkpoints import (
    save_pt,
)
from support.pickles import run_here

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies, pickle_sandbox
from medusa_chat.cli.main import main
from medusa_chat.errors import ModelError


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


def behind_the_storage(file, canary):
    """A tensor as large as its data, but it begins a row after it."""
    torch.save(GOOD | {W: torch.zeros(33, 32)[1:]}, file)
    rewritten(file, lambda name, data: data[:4096] if name.endswith("data/0") else data)


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
    code_in_zip: f"asks to run '{os.name} system'",
    code_in_a_key: f"asks to run '{os.name} system'",
    code_in_raw_pickle: "not a torch.save archive",
    code_in_legacy: "not a torch.save archive",
    code_by_eval: "asks to run '__builtin__ eval'",
    code_by_instance: "does more than list tensors",
    code_by_stack_global: f"asks to run '{os.name} system'",
    an_object: "asks to run",
    a_module: "asks to run",
    legacy: "before torch 1.6",
    bomb: "compressed",
    cut_zip: "cut short",
    cut_zip_early: "cut short",
    twice_in_zip: "two with the same name",
    two_programs: "exactly one data.pkl",
    no_program: "exactly one data.pkl",
    lying_size: "",
    a_list: "holds a list",
    nested: "'state_dict' is not a tensor",
    numbered: "'0' is not a tensor",
    text_beside: "'note' is not a tensor",
    one_number_repeated: "not contiguous",
    transposed: "not contiguous",
    every_second: "not contiguous",
    storage_cut: "larger than its data",
    behind_the_storage: "larger than its data",
    storage_missing: "no data",
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
def test_a_bad_pickle_is_refused_without_running(write, lone_heads, tmp_path):
    canary = tmp_path / "canary"
    write(lone_heads / PICKLED, canary)
    require(refusal(lone_heads), PICKLED, BAD_PICKLES[write])
    assert not canary.exists()
    assert not any(paths.cache_dir().rglob("*.safetensors"))


def test_code_would_run_without_the_gate(tmp_path):
    """The canary is a canary: plain unpickling touches it."""
    canary = tmp_path / "canary"
    code_in_raw_pickle(tmp_path / "file", canary)
    getattr(pickle, "loads")((tmp_path / "file").read_bytes())  # noqa: B009
    assert canary.exists()


# What only the child sees.


def job(file):
    target = file.with_suffix(".safetensors")
    return pickle_sandbox.job_of([file], [target], [pickle_sandbox.checked_header(file)])


def test_the_child_refuses_what_its_header_hides(tmp_path):
    """A list that says otherwise, a file that is gone; and before it values shared too often."""
    files = {name: tmp_path / f"{name}.pt" for name in ("good", "gone", "other", "shared")}
    for name in ("good", "gone", "other"):
        save_pt(GOOD, files[name])
    jobs = {name: job(file) for name, file in files.items() if name != "shared"}
    files["gone"].write_bytes(files["gone"].read_bytes()[:500])
    save_pt({W: torch.zeros(2, 2)}, files["other"])
    problems = {name: run_here(job) for name, job in jobs.items()}
    assert problems["good"] is None
    assert "torch cannot read it" in problems["gone"]
    assert "the tensors that torch reads differ" in problems["other"]
    once = torch.zeros(64, 64)
    save_pt({f"{h}.0.linear.weight": once for h in range(16)}, files["shared"])
    with pytest.raises(ModelError, match="share storage"):
        job(files["shared"])


def test_the_child_bounds_its_memory_its_time_and_its_files(monkeypatch):
    bounds = {}
    monkeypatch.setattr(pickle_sandbox, "limit_memory", lambda more: bounds.update(memory=more))
    monkeypatch.setattr(pickle_sandbox, "lower_limit", bounds.__setitem__)
    pickle_sandbox.limit(1000, 5.0)
    kinds = ("RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_CORE")
    assert bounds.keys() == {"memory", *(getattr(pickle_sandbox.resource, kind) for kind in kinds)}


def test_nothing_outside_weakens_the_child(monkeypatch):
    weak = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONSTARTUP": "/tmp/x.py"}
    for name, value in weak.items():
        monkeypatch.setenv(name, value)
    assert not weak.keys() & pickle_sandbox.environment().keys()


def test_a_file_that_was_replaced_is_converted_anew(lone_heads, monkeypatch):
    monkeypatch.setattr(pickle_sandbox, "run", run_here)
    file = lone_heads / PICKLED
    save_pt(GOOD, file)
    first = pickle_sandbox.convert([file])
    save_pt({name: tensor + 1 for name, tensor in GOOD.items()}, file)  # as many bytes
    os.utime(file, (2_000_000_000, 2_000_000_000))
    assert pickle_sandbox.convert([file]) != first


def test_a_child_that_dies_or_hangs_refuses_its_file(tmp_path, monkeypatch):
    save_pt(GOOD, tmp_path / "heads.pt")
    doomed = job(tmp_path / "heads.pt")
    monkeypatch.setattr(pickle_sandbox, "STARTUP", -0.9)
    assert "took too long" in pickle_sandbox.run(doomed)
    dead = subprocess.CompletedProcess([], -11, stdout="")
    monkeypatch.setattr(pickle_sandbox.subprocess, "run", lambda *command, **how: dead)
    assert "ended with code -11" in pickle_sandbox.run(doomed)


def test_a_bad_value_is_refused_though_it_was_converted(lone_heads, monkeypatch):
    monkeypatch.setattr(pickle_sandbox, "run", run_here)
    save_pt(spoiled(torch.inf), lone_heads / PICKLED)
    require(refusal(lone_heads), PICKLED, "NaN or infinity")


def test_a_full_disk_is_said_before_anything_is_written(lone_heads, monkeypatch):
    save_pt(GOOD, lone_heads / PICKLED)
    usage = shutil.disk_usage(lone_heads)
    monkeypatch.setattr(kept_copies.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ModelError, match=r"free some \(.*\), or set --data-dir"):
        pickle_sandbox.convert([lone_heads / PICKLED])


@pytest.mark.parametrize("is_cached", [True, False])
def test_what_was_converted_is_listed_and_removed(is_cached, lone_heads, tmp_path, capsys):
    folder = lone_heads
    if is_cached:
        folder = tmp_path / "hub" / "models--owner--heads" / "snapshots" / "0"
        folder.mkdir(parents=True)
    save_pt(GOOD, folder / PICKLED)
    made = pickle_sandbox.convert([folder / PICKLED])
    (copy,) = kept_copies.kept()
    assert copy.folder == made and copy.bytes >= (made / "model.safetensors").stat().st_size
    assert pickle_sandbox.convert([folder / PICKLED]) == made
    name = "owner/heads" if is_cached else str(folder)
    assert main(["models", "list"]) == 0
    assert f"{name}  (converted to safetensors)" in capsys.readouterr().out
    assert main(["models", "rm", name]) == 0
    assert not made.exists() and (folder / PICKLED).is_file()
