"""Files of ours: whole or not at all, and on the disk before they count."""

import os
from pathlib import Path

import pytest

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.errors import ModelError


def test_a_file_that_cannot_be_written_leaves_the_last_one_and_no_half(tmp_path, monkeypatch):
    file = tmp_path / "folder" / "file.json"
    paths.write_text(file, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        paths.write_text(file, "new")
    assert file.read_text() == "old" and list(file.parent.iterdir()) == [file]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *two: (done.append("name"), replace(*two)))
    paths.write_text(tmp_path / "file", "x")
    assert done == ["sync", "name", "sync"]
    paths.write_folder(tmp_path / "made", lambda folder: (folder / "file").write_text("x"))
    assert done[3:] == ["sync", "name", "sync"]


def test_what_a_killed_program_left_of_a_file_goes_when_it_is_written_again(tmp_path):
    left, young, other = (tmp_path / f".{name}.x.tmp" for name in ("[a]", "[a].y", "a"))
    for file in (left, young, other):
        file.touch()
    for file in (left, other):
        os.utime(file, (0, 0))
    paths.write_text(tmp_path / "[a]", "x")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "[a]", young, other])


def test_a_file_that_a_scanner_has_open_for_a_moment_is_replaced(tmp_path, monkeypatch):
    """Windows refuses to replace it; what took an hour was thrown away."""
    refusals, replace = [1, 2, 3], os.replace

    def refuse(*two):
        if refusals and refusals.pop():
            raise PermissionError(13, "Access is denied", str(two[0]))
        replace(*two)

    monkeypatch.setattr(paths, "OPEN_SECONDS", 2.0)
    monkeypatch.setattr(os, "replace", refuse)
    paths.write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new" and not refusals
    monkeypatch.setattr(paths, "OPEN_SECONDS", 0.01)
    refusals.extend([1] * 100)
    with pytest.raises(PermissionError, match="another program has it open"):
        paths.write_text(tmp_path / "file", "newer")


def test_a_converted_model_outlives_a_refused_name(tmp_path, monkeypatch):
    refusals, replace = [1], os.replace

    def refuse(source, target):
        if os.path.isdir(source) and refusals:
            raise PermissionError(refusals.pop(), "Access is denied")
        replace(source, target)

    monkeypatch.setenv(paths.DATA_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(paths, "OPEN_SECONDS", 2.0)
    monkeypatch.setattr(os, "replace", refuse)
    folder = kept_copies.root("gguf") / "a"
    folder.parent.mkdir(parents=True)
    with kept_copies.writing(folder, kept_copies.Origin("a", "b", "bf16")) as partial:
        (partial / "model.safetensors").write_bytes(b"x")
    assert kept_copies.is_kept(folder) and not refusals


def test_a_copy_that_a_process_reads_stays_and_is_listed(tmp_path, monkeypatch):
    """Windows does not delete an open file: what was left of the copy was never listed again."""
    monkeypatch.setenv(paths.DATA_DIR_VARIABLE, str(tmp_path))
    folder, unlink = kept_copies.root("gguf") / "a", Path.unlink
    folder.parent.mkdir(parents=True)
    with kept_copies.writing(folder, kept_copies.Origin("a", "b", "bf16")) as partial:
        (partial / "model.safetensors").write_bytes(b"x" * 5000)
        (partial / "config.json").write_bytes(b"{}")
    size = kept_copies.kept()[0].bytes

    def refuse(path, **options):
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Access is denied")
        unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(ModelError, match="end what uses it"):
            kept_copies.remove("a")
    assert [one.bytes for one in kept_copies.kept()] == [size]
    assert kept_copies.remove("a") == size and not folder.exists()


def test_a_folder_that_takes_no_file_is_told_whatever_the_system_says(tmp_path, monkeypatch):
    """os.access calls every folder of Windows writable."""

    def refuse(path, **options):
        raise PermissionError(13, "Access is denied")

    monkeypatch.setenv(paths.DATA_DIR_VARIABLE, str(tmp_path))
    assert paths.unwritable() == [] and list(tmp_path.iterdir()) == []
    (tmp_path / f".{paths.APP}-{os.getpid()}").touch()  # a try of another thread
    assert paths.unwritable() == []
    monkeypatch.setattr(Path, "touch", refuse)
    assert paths.unwritable() == [paths.data_dir(), paths.state_dir(), paths.cache_dir()]
