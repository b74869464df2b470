"""A checkpoint's files are regular ones: a pipe, a device or a dead drive holds nobody up."""

import os
import shutil
import threading

import pytest
from support.checkpoints import write_checkpoint

from medusa_chat.checkpoints.layouts import source
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.cli.main import main
from medusa_chat.errors import ModelError

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("regular") / "model")


@needs_pipes
@pytest.mark.parametrize(
    "name", ["config.json", "adapter_config.json", "tokenizer.json", "medusa_lm_head.pt"]
)
def test_a_pipe_is_refused_at_once_by_whoever_opens_the_checkpoint(whole, tmp_path, capsys, name):
    """Reading it waited for ever: for a writer that does not come."""
    for file in whole.iterdir():
        os.link(file, tmp_path / file.name)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    for command in (["inspect", str(tmp_path)], ["generate", "--prompt", "x", "--checkpoint"]):
        code = main(command if command[0] == "inspect" else [*command, str(tmp_path)])
        assert code == 4
        error = capsys.readouterr().err.splitlines()[-1]
        assert "is not a readable file" in error and name in error


@needs_pipes
def test_a_piece_of_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="not a readable file"):
        source.read_piece(tmp_path / "pipe", 0, 1)


def test_below_the_root_of_the_system_nothing_is_looked_at(capsys):
    """A device was named that nobody had asked for."""
    assert main(["inspect", os.path.abspath(os.sep)]) == 4
    assert "neither Medusa heads nor a model" in capsys.readouterr().err


def test_a_folder_below_that_may_not_be_read_refuses_nothing(whole, tmp_path, monkeypatch):
    """As "lost+found" beside a checkpoint on a drive of its own."""
    for file in whole.iterdir():
        os.link(file, tmp_path / file.name)
    (tmp_path / "lost+found").mkdir()
    scandir, access, lost = os.scandir, os.access, str(tmp_path / "lost+found")

    def refuse(folder):
        if str(folder) == lost:
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != lost and access(path, mode))
    assert LocalFolder(tmp_path).files()["config.json"] > 0


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="this system has no /dev/zero")
def test_a_device_is_refused(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="not a readable file"):
        LocalFolder(tmp_path).files()


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="this system has no /proc")
@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "a.gguf"])
def test_a_file_that_the_kernel_makes_up_is_refused(whole, tmp_path, capsys, name):
    """It is regular by its mode, and another library would wait for it: /proc/kmsg."""
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/proc/self/environ")
    place = str(folder / name if name == "a.gguf" else folder)
    for command in (["inspect", place], ["generate", "--prompt", "x", "--checkpoint", place]):
        assert main(command) == 4
        assert "is not a readable file" in capsys.readouterr().err.splitlines()[-1]


def test_a_drive_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    gone = threading.Event()
    monkeypatch.setattr(source, "SECONDS", 0.05)
    monkeypatch.setattr(os, "scandir", lambda folder: gone.wait(600))
    with pytest.raises(ModelError, match="does not respond"):
        LocalFolder(tmp_path).files()
    gone.set()
