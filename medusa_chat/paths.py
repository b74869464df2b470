"""Paths of the program's files and of the user's files, and atomic writes.

assets/ and presets/ are beside the package in a checkout and an editable install, inside it in a
wheel. The user's files are in the platform's folders, or under `--data-dir`.
"""

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from glob import escape
from pathlib import Path

APP = "medusa-chat"
DATA_DIR_VARIABLE = "MEDUSA_CHAT_DATA_DIR"  # an environment variable: the worker inherits it
OPEN_SECONDS = 2.0 if os.name == "nt" else 0.0  # a virus scanner opens new files
SYNCED = "rb+" if os.name == "nt" else "rb"  # on other systems, read-only files can be synced
STALE_SECONDS = 3600.0  # then a temporary file is abandoned
PACKAGE = Path(__file__).resolve().parent


def asset(*parts: str) -> Path:
    """A file or folder of assets/; it may not exist."""
    return _shipped("assets").joinpath(*parts)


def preset(*parts: str) -> Path:
    """A file or folder of presets/; it may not exist."""
    return _shipped("presets").joinpath(*parts)


def _shipped(folder: str) -> Path:
    inside = PACKAGE / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def use_data_dir(folder: str | Path) -> None:
    """Keep the user's files under `folder` (`--data-dir`), in this process and its children."""
    os.environ[DATA_DIR_VARIABLE] = str(Path(folder).expanduser().resolve())


def data_dir() -> Path:
    """The folder for data that the user must not lose: chats."""
    return _of_user("data")


def state_dir() -> Path:
    """The folder of what can be measured again: tuner results, logs, traces."""
    return _of_user("state")


def cache_dir() -> Path:
    """The folder of what can be deleted at any time."""
    return _of_user("cache")


def unwritable() -> list[Path]:
    """The user's folders that cannot be created or written."""
    failed = []
    for folder in (data_dir(), state_dir(), cache_dir()):
        place = next(one for one in (folder, *folder.parents) if one.exists())
        if not can_write(place):
            failed.append(folder)
    return failed


def can_write(folder: Path) -> bool:
    """Whether a file can be created in a folder; os.access is unreliable on Windows."""
    trial = folder / f".{APP}-{uuid.uuid4().hex}"  # tempfile would try 10,000 names on Windows
    try:
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError:
        return False
    return True


def _of_user(kind: str) -> Path:
    """The folder of one kind; it may not exist."""
    if chosen := os.environ.get(DATA_DIR_VARIABLE):
        return Path(chosen) / kind
    import platformdirs

    return Path(getattr(platformdirs, f"user_{kind}_dir")(APP, appauthor=False))


def drop_leftovers(folder: Path, pattern: str, seconds: float) -> None:
    """Delete files and folders that killed processes left: those that match and are this old."""
    for leftover in folder.glob(pattern):
        try:
            if time.time() - leftover.stat().st_mtime <= seconds:
                continue
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()
        except OSError:
            continue  # another process deleted it, or it is not ours


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder durably: its content is on the disk first. Retries on Windows, where
    another program, such as a virus scanner, may have it open for a moment. Raises OSError."""
    for file in source.rglob("*") if source.is_dir() else [source]:
        if file.is_file():
            with open(file, SYNCED) as stream:
                os.fsync(stream.fileno())
    until = time.monotonic() + OPEN_SECONDS
    while True:
        try:
            os.replace(source, target)
            return _sync_folder(target.parent)
        except PermissionError as error:
            if time.monotonic() >= until:
                if OPEN_SECONDS:
                    error.strerror = f"{error.strerror}: another program has it open, try again"
                raise
            time.sleep(0.05)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically, like `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically, even if the machine crashes; creates its folder.

    Raises OSError, and then leaves no partial file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_leftovers(path.parent, f".{escape(path.name)}.*.tmp", STALE_SECONDS)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(data)
        replace(Path(name), path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_folder(output: Path, fill: Callable[[Path], None]) -> int:
    """Let `fill` write a temporary folder, then rename it to `output`; returns its bytes.

    Raises FileExistsError if `output` exists by then, OSError, and what `fill` raises; then leaves
    no partial folder.
    """
    partial = output.with_name(f".{output.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        fill(partial)
        if output.exists():
            raise FileExistsError(output)
        replace(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(file.stat().st_size for file in output.rglob("*") if file.is_file())


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; not needed on Windows."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
