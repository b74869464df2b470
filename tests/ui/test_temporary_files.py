"""The folder of the page's temporary files: nobody else's, and gone with its program."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medusa_chat.errors import UsageError
from medusa_chat.ui import temporary_files

HERE = Path(__file__).parents[2]
MAKE = "import os, sys, medusa_chat.ui; print(os.environ['GRADIO_TEMP_DIR'], flush=True); "
WAIT = f"{MAKE} sys.stdin.read()"
OPEN_PAGE = """
from support.scripted import ScriptedRunner
from medusa_chat.runtime.session import Session
from medusa_chat.ui import no_stubs
with no_stubs():
    from medusa_chat.ui.app import open_page
session = Session(ScriptedRunner())
opened = open_page(session)
print(opened.url)
opened.close()
session.close()
"""


def environment(place: Path) -> dict[str, str]:
    names = ("TMPDIR", "TEMP", "TMP")
    found = os.pathsep.join(map(str, (HERE, HERE / "tests")))
    return {**os.environ, **dict.fromkeys(names, str(place)), "PYTHONPATH": found}


@contextmanager
def program(place: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A program with a folder there, until its input ends or it is killed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WAIT], env=environment(place), **pipes) as child:
        yield child, Path(child.stdout.readline().strip())
        child.kill()


def test_a_gradio_folder_of_another_user_is_not_in_the_way(tmp_path):
    """The page ended with a traceback: Gradio makes a folder in it at its start."""
    (tmp_path / "gradio").write_text("of another user: nothing can be made in it")
    command = [sys.executable, "-c", OPEN_PAGE]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert done.stdout.startswith("http://127.0.0.1:"), done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["gradio"]


def test_folders_of_killed_programs_go_and_those_of_running_ones_stay(tmp_path):
    with program(tmp_path) as (killed, left), program(tmp_path) as (_, running):
        (left / "part").write_text("x")
        killed.kill()
        killed.wait()
        assert left.is_dir()
        older, others = tmp_path / "medusa-chat-of-an-older-version", tmp_path / "medusa-chat-notes"
        older.mkdir()
        others.write_text("a file")
        with program(tmp_path) as (ending, own):
            assert sorted(tmp_path.iterdir()) == sorted([running, own, older, others])
            ending.stdin.close()
            ending.wait()
            assert not own.exists() and running.is_dir()


def test_no_room_for_temporary_files_is_one_line(monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(temporary_files.tempfile, "mkdtemp", full)
    with pytest.raises(UsageError, match="No space left on device; set TMPDIR"):
        temporary_files.own_folder()
