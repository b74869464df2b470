"""The C library of decoding/backends/kernels: compiled and tried on this machine, and kept.

What is kept passed the trial (native_trial.py), without the instructions that gave wrong products:
portable C does their work.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from medusa_chat import paths
from medusa_chat.errors import UsageError

SOURCES = paths.PACKAGE / "decoding" / "backends" / "kernels"  # all of its *.c, with their *.h
SECONDS = 600  # a slow machine's compiler; a few are usual, and zig builds its libc first
PLACE = "MEDUSA_CHAT_NATIVE"  # "0": torch's operators alone; "1" or none: the cache; or a folder


REMEDY = "pip install ziglang, or install gcc or clang"  # where there is no compiler
ZIG = "ziglang"  # a package of PyPI: Clang with a libc for every system
ZIG_FOLDERS = ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
# How the library is compiled without the instructions that it has written by hand, by what it calls
# them: without their macros there is other code for the same. The compiler goes on to use them.
PORTABLE = {
    "AVX-512": ["-U__AVX512BW__", "-U__AVX512VL__", "-U__AVX512BF16__"],
    "AVX2": ["-U__AVX2__", "-U__AVX__", "-U__FMA__", "-U__F16C__"],
    "AMX": ["-U__AMX_BF16__"],
    **dict.fromkeys(("AVX-512 VNNI", "AVX-VNNI", "vpmaddubsw", "sdot"), ["-DPLAIN_DOT"]),
}


def advice() -> str:
    """What a compiler would do where there is none."""
    return f"with a C compiler several times faster ({REMEDY})"


def compiler() -> list[str] | None:
    """The command of a C compiler that speaks GCC's language and has pthreads: $CC, else cc, gcc
    or clang, which on Windows may have none, else zig's. None where there is none, or where
    MEDUSA_CHAT_NATIVE=0."""
    if os.environ.get(PLACE) == "0":
        return None
    if asked := shlex.split(os.environ.get("CC", "")):
        return _found(asked)
    tried = () if sys.platform == "win32" else ("cc", "gcc", "clang")
    return next(filter(None, (_found([name]) for name in tried)), _zig())


def _found(command: list[str]) -> list[str] | None:
    found = shutil.which(command[0])
    return [found, *command[1:]] if found else None


def _zig() -> list[str] | None:
    """zig's Clang. Its package is never imported here: it has 400 MB, and one program."""
    return [sys.executable, "-P", "-m", ZIG, "cc"] if find_spec(ZIG) else None


def library() -> ctypes.CDLL | None:
    """The library, compiled the first time (a few seconds) and opened; None, with a line in the
    log, where that cannot be done: torch's operators then do its work. Raises UsageError for a
    MEDUSA_CHAT_NATIVE that is no folder."""
    command = compiler()
    return None if command is None else opened(tuple(command))


@cache
def opened(command: Sequence[str]) -> ctypes.CDLL | None:
    """The same, by this compiler; asked once in a process."""
    try:
        folder = _folder()
        file = folder / f"{_name(command)}{'.dll' if sys.platform == 'win32' else '.so'}"
        paths.drop_leftovers(folder, "tmp*.tmp", SECONDS)
        if not file.is_file():
            _build(command, file)
        return ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        if isinstance(error, subprocess.TimeoutExpired):  # its own words are the whole command
            said = f"the compiler took longer than {SECONDS} seconds"
        line = str(said).strip().partition("\n")[0]
        logging.getLogger(__name__).warning("the C library cannot be used: %s", line)
        return None


def _folder() -> Path:
    """Where the library is kept."""
    place = os.environ.get(PLACE, "")
    if place in ("", "1"):
        return paths.cache_dir() / "native"
    if not Path(place).is_absolute():
        raise UsageError(f"{PLACE} is {place[:80]!r}: give 0, 1 or the whole path of a folder")
    return Path(place)


def _flags() -> list[str]:
    """-march=native for x86, -mcpu=native elsewhere. No sum may be reordered or contracted: what
    the bits of a row are must not depend on the rows beside it."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    tuned = "-march=native" if is_x86 else "-mcpu=native"
    placed = [] if sys.platform == "win32" else ["-fPIC"]  # there all code is
    return [
        *("-std=gnu11", "-O2", tuned, "-ffp-contract=off", "-fno-math-errno"),
        *(*placed, "-fvisibility=hidden", "-pthread"),
    ]


def _name(command: Sequence[str]) -> str:
    """The cache key of the library: its sources, the compiler, all flags and this CPU."""
    version = subprocess.run([*command, "--version"], capture_output=True, timeout=SECONDS).stdout
    parts = [version, *(f.encode() for f in (*command[1:], *_flags())), _cpu(), *_sources()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def identity() -> str:
    """A name for the library: another one where its sources, its compiler, a flag or the CPU
    differs; empty where there is none."""
    found = library()
    return "" if found is None else Path(found._name).stem


def _sources() -> Iterator[bytes]:
    for file in sorted(SOURCES.glob("*.[ch]")):
        yield from (file.name.encode(), file.read_bytes())


def _cpu() -> bytes:
    """The CPU's model and what it can do, for a home that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        kinds = (b"model name", b"flags", b"Features", b"CPU part")
        return b"\n".join(sorted({line for line in lines if line.startswith(kinds)}))
    except OSError:
        return f"{sys.platform} {platform.machine()} {platform.processor()}".encode()


def _build(command: Sequence[str], file: Path) -> None:
    """Compile the library until it passes its trial, each time without what was wrong. Raises
    OSError where portable C is wrong, too."""
    from medusa_chat.checkpoints import native_trial  # numpy, which only this needs

    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    off: list[str] = []
    with tempfile.TemporaryDirectory(dir=file.parent, suffix=".tmp") as folder:
        made = Path(folder) / file.name
        while True:
            flags = [flag for name in off for flag in PORTABLE[name]]
            told = [f"-DWITHOUT={', '.join(off)}"] if off else []
            _compile([*command, *flags, *told], made)
            wrong = native_trial.wrong_instructions(made)
            if not wrong:
                paths.replace(made, file)
                return
            fresh = [name for name in wrong if name in PORTABLE and name not in off]
            if not fresh:
                raise OSError(f"its products by {wrong[0]} are wrong")
            off += fresh


def _compile(command: Sequence[str], file: Path) -> None:
    """Write the library whole or not at all: two programs may compile at the same time. Files are
    compiled side by side, the longest first. What zig keeps for later, 50 MB, is not kept."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    sources = sorted(SOURCES.glob("*.c"), key=lambda source: -source.stat().st_size)
    with (
        tempfile.TemporaryDirectory(dir=file.parent, suffix=".tmp") as folder,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        made, kept = Path(folder) / file.name, dict.fromkeys(ZIG_FOLDERS, folder)
        objects = [made.with_name(f"{source.stem}.o") for source in sources]

        def run(*options: str | Path) -> None:
            subprocess.run(
                [*command, *_flags(), *map(str, options)],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, **kept},
                timeout=SECONDS,
            )

        list(pool.map(lambda source, to: run("-c", source, "-o", to), sources, objects))
        run("-shared", *objects, "-o", made, "-lm")
        paths.replace(made, file)
