"""The GGUF files that LM Studio and llama.cpp keep on this disk, by their names alone."""

import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from medusa_chat.gguf_files import parts_of, whole_files

DEEPEST = 4  # folders below that of the program: LM Studio has owner/name/FILE.gguf
MOST = 200  # files that are listed


@dataclass(frozen=True)
class LocalGguf:
    """A file that can be loaded. app: whose folder it lies in."""

    path: str
    bytes: int
    app: str


def local_files() -> tuple[LocalGguf, ...]:
    """The GGUF files in these programs' folders, by path, each once. No file is opened."""
    found: dict[str, LocalGguf] = {}
    for app, folder in library_folders():
        for path, size in _files(folder):
            found.setdefault(path, LocalGguf(path, size, app))
            if len(found) >= MOST:
                break
    return tuple(found[path] for path in sorted(found))


def library_folders() -> list[tuple[str, Path]]:
    """(program, folder) of where they keep models on this system; they need not exist."""
    home = Path.home()
    studio = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    own = os.environ.get("LLAMA_CACHE")
    cpp = Path(own) if own else _caches(home) / "llama.cpp"
    return [*(("LM Studio", folder) for folder in studio), ("llama.cpp", cpp)]


def _caches(home: Path) -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Path and bytes of each GGUF file below a folder, of a split one by its first part; links to
    folders are not followed."""
    start = len(folder.parts)
    for root, folders, names in os.walk(folder):
        deep = len(Path(root).parts) - start
        folders[:] = [] if deep >= DEEPEST else sorted(f for f in folders if f[0] != ".")
        for name in sorted(whole_files(names)):
            try:
                facts = [os.stat(os.path.join(root, part)) for part in parts_of(name)]
            except OSError:
                continue  # a link to nothing
            if all(stat.S_ISREG(one.st_mode) for one in facts):
                yield os.path.join(root, name), sum(one.st_size for one in facts)
