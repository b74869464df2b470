"""Which GGUF file is meant: of several in one folder, and by a name on the Hub.

It imports nothing of ours."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

ENDING = ".gguf"
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
BESIDE = re.compile(r"^(mmproj|imatrix)|[-_.]mmproj[-_.]|[-_.]imatrix[-_.]", re.IGNORECASE)
WHOLE = re.compile(r"(^|[-_.])(b?f|fp)(16|32)([-_.]|$)", re.IGNORECASE)  # not quantised


def is_gguf(name: str) -> bool:
    return name.lower().endswith(ENDING)


def is_model(name: str) -> bool:
    """Whether a file can be loaded, by its name."""
    return is_gguf(name) and not BESIDE.search(_last(name)) and not part_of_split(name)


def split_name(name: str) -> tuple[str, str | None]:
    """The repo and the file of owner/name/FILE.gguf; without a file the name as it is."""
    parts = name.split("/")
    if len(parts) < 3 or not is_gguf(name):
        return name, None
    return "/".join(parts[:2]), "/".join(parts[2:])


def choose_file(sizes: Mapping[str, int]) -> tuple[str | None, str]:
    """The file to read of those in one folder (name -> bytes), None where there is none, and a
    sentence that says so where there are several.

    Once read, all take the same memory: the largest has lost least. One that is not quantised is
    only longer to fetch. What is no model of its own (images, statistics) is left out, and a part
    of a split file too unless there is nothing else.
    """
    models = {n: size for n, size in sizes.items() if is_gguf(n) and not BESIDE.search(_last(n))}
    whole = {name: size for name, size in models.items() if not PART.search(name)} or models
    quantised = {name: size for name, size in whole.items() if not WHOLE.search(_last(name))}
    found = quantised or whole
    if not found:
        return None, ""
    chosen = min(found, key=lambda name: (-found[name], name))
    if len(models) == 1:
        return chosen, ""
    which = "largest quantised" if quantised else "largest"
    return chosen, (
        f"reading {chosen}, the {which} of {len(models)} GGUF files: name another file to read "
        "that one (once loaded, all take the same memory)"
    )


def choose_in_repo(sizes: Mapping[str, int]) -> tuple[str | None, str]:
    """choose_file for a whole repo: in its root, else in the first folder that has some."""
    folders: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        if is_gguf(name):
            folders.setdefault(str(PurePosixPath(name).parent), {})[name] = size
    choices = (choose_file(folders[folder]) for folder in sorted(folders))
    return next((choice for choice in choices if choice[0]), (None, ""))


def part_of_split(name: str) -> str:
    """Why a file cannot be read by itself, as a clause; empty where it can."""
    match = PART.search(name)
    if match is None or int(match[2]) == 1:
        return ""
    return f"part {int(match[1])} of {int(match[2])} of a split file"


def _last(name: str) -> str:
    return PurePosixPath(name).name
