"""The folder of the page's temporary files: the program's own, and gone with it, even killed."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from medusa_chat.errors import UsageError

PREFIX = "medusa-chat-"
RUNNING = "running"  # a file in it; while its program runs the folder is locked, or this is open


def own_folder() -> Path:
    """A new folder for this process alone; it goes when the process ends. Those of programs that
    were killed go now. Raises UsageError where there is no room for one."""
    try:
        sweep(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        held = _hold(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot make a folder for temporary files: {reason}; set TMPDIR to one with room"
        ) from None
    atexit.register(_end, folder, held)
    return folder


def sweep(place: Path) -> None:
    """Delete the folders there whose programs have ended without doing so."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            if _is_ours(folder) and _has_ended(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another program was faster, or it is not ours to read


def _is_ours(folder: Path) -> bool:
    """Whether it was made here, by this user. A program that makes one has not locked it before
    the file is there."""
    is_own = os.name == "nt" or folder.lstat().st_uid == os.getuid()
    return is_own and not folder.is_symlink() and (folder / RUNNING).is_file()


def _hold(folder: Path) -> int | IO[bytes]:
    """Show that the program runs that this folder belongs to, until what is returned is closed."""
    if os.name == "nt":  # where nobody can delete a file that is open
        return open(folder / RUNNING, "wb")
    handle = os.open(folder, os.O_RDONLY)
    if _lock(handle):
        (folder / RUNNING).touch()
    return handle


def _has_ended(folder: Path) -> bool:
    if os.name == "nt":
        (folder / RUNNING).unlink()
        return True
    handle = os.open(folder, os.O_RDONLY)
    try:
        return _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock a folder; False where another process has, or where folders cannot be locked."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _end(folder: Path, held: int | IO[bytes]) -> None:
    if not isinstance(held, int):
        held.close()
    shutil.rmtree(folder, ignore_errors=True)
    if isinstance(held, int):
        os.close(held)  # not before: nobody else is to delete it too
