"""GGUF files by their names: which one is meant, its parts, and those of other programs.

A split file has several parts (llama.cpp's gguf-split: NAME-00001-of-00003.gguf), is read as one
and named by the first. Imports nothing of ours."""

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ENDING = ".gguf"
PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$", re.IGNORECASE)
BESIDE = re.compile(r"^(mmproj|imatrix)|[-_.]mmproj[-_.]|[-_.]imatrix[-_.]", re.IGNORECASE)
WHOLE = re.compile(r"(^|[-_.])(b?f|fp)(16|32)([-_.]|$)", re.IGNORECASE)  # not quantised


def is_gguf(name: str) -> bool:
    return name.lower().endswith(ENDING)


def split_name(name: str) -> tuple[str, str | None]:
    """The repo and the file of owner/name/FILE.gguf; without a file the name as it is."""
    parts = name.split("/")
    if len(parts) < 3 or not is_gguf(name):
        return name, None
    return "/".join(parts[:2]), "/".join(parts[2:])


def part_of(name: str) -> tuple[int, int]:
    """Which part a file is by its name, and of how many; (1, 1) for one that is not split."""
    match = PART.search(name)
    number, count = (int(match[1]), int(match[2])) if match else (1, 1)
    return (number, count) if 1 <= number <= count else (1, 1)


def parts_of(name: str) -> tuple[str, ...]:
    """All parts of the file that one of them names, the first one first; itself where it is not
    split."""
    count = part_of(name)[1]
    return tuple(_part(name, number) for number in range(1, count + 1))


def first_part(name: str) -> str:
    """What the file is called that one of its parts names; itself where it is not split."""
    return _part(name, 1)


def whole_files(names: Iterable[str]) -> list[str]:
    """Those that can be loaded, by name: with all their parts, and models of their own (no images,
    no statistics)."""
    return [name for name, parts in _files(names).items() if len(parts) == part_of(name)[1]]


def choose_file(sizes: Mapping[str, int]) -> tuple[str | None, str]:
    """The file to read of a folder and those below it (name -> bytes), None where there is none,
    and a sentence that says so where there are several.

    Those least deep come first, and those with all their parts. Once read, all take the
    same memory: the largest has lost least. One that is not quantised is only longer to fetch.
    """
    files = _files(sizes)
    files = {name: files[name] for name in whole_files(sizes)} or files
    level = min((name.count("/") for name in files), default=0)
    total = {n: sum(map(sizes.__getitem__, p)) for n, p in files.items() if n.count("/") == level}
    quantised = {name: size for name, size in total.items() if not WHOLE.search(_last(name))}
    candidates = quantised or total
    if not candidates:
        return None, ""
    chosen = min(candidates, key=lambda name: (-candidates[name], name))
    if len(total) == 1:
        return chosen, ""
    which = "largest quantised" if quantised else "largest"
    return chosen, (
        f"reading {chosen}, the {which} of {len(total)} GGUF files: name another file to read "
        "that one (once loaded, all take the same memory)"
    )


def _files(names: Iterable[str]) -> dict[str, list[str]]:
    """What files are called -> those of their parts that are there."""
    by_stem: dict[str, list[str]] = {}
    for name in names:
        if is_gguf(name) and not BESIDE.search(_last(name)):
            by_stem.setdefault(first_part(name), []).append(name)
    return by_stem


def _part(name: str, number: int) -> str:
    if part_of(name)[1] == 1:
        return name
    start = len(name) - len("00001-of-00001.gguf")
    return f"{name[:start]}{number:05d}{name[start + 5 :]}"


def _last(name: str) -> str:
    return PurePosixPath(name).name


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
    by_path: dict[str, LocalGguf] = {}
    for app, folder in library_folders():
        for path, size in _files_below(folder):
            by_path.setdefault(path, LocalGguf(path, size, app))
            if len(by_path) >= MOST:
                break
    return tuple(by_path[path] for path in sorted(by_path))


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


def _files_below(folder: Path) -> Iterator[tuple[str, int]]:
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
