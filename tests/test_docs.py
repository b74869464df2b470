"""README, CONTRIBUTING, CHANGELOG and docs: their links, paths and commands are true."""

import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from support.doc_commands import COMMANDS, FENCE, ROOT, shown, words

from medusa_chat.bench import ALONE, NAMED, STUDIES
from medusa_chat.checkpoints.memory_needs import PRECISIONS
from medusa_chat.decoding.backends import fused_kernels
from medusa_chat.decoding.settings import ACCEPTANCE_NAMES

NOTES = ROOT / "assets/benchmarks/NOTES.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), NOTES])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
BASES = (ROOT, ROOT / "medusa_chat/decoding")  # how-a-step-works.md names modules from there
TRIED = ("wide-logits", "quantised-product", "split-attention", *fused_kernels.NAMES)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def commands(text: str) -> list[list[str]]:
    """The words of every `medusa-chat ...` of a page."""
    return [words(one) for one in shown(text) if one.startswith("medusa-chat")]


def wrong(words: list[str]) -> str:
    """What of a command line the command line does not know; empty where all is known."""
    command, path = COMMANDS, "medusa-chat"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"{path} {words[0]}"
        path, command, words = f"{path} {words[0]}", command.commands[words[0]], words[1:]
    groups = [command, *getattr(command, "commands", {}).values()]
    if path == "medusa-chat" and "ui" in getattr(command, "commands", {}):
        groups = [command, command.commands["ui"]]
    known = {o for c in groups for p in c.params for o in (*p.opts, *p.secondary_opts)}
    known_studies = (*STUDIES, *NAMED, *ALONE)
    unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in known | {"--help"}]
    for option, name in pairwise(words):
        if option == "--study" and not name.isupper() and name not in known_studies:
            unknown.append(f"--study {name}")
    return f"{path} {unknown[0]}" if unknown else ""


def named_paths(text: str) -> Iterator[str]:
    """Every word in backticks that names a source file, or a place in a folder of the checkout."""
    for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        for word in span.split():
            if re.fullmatch(r"(?:medusa_chat|tests|assets|presets|backends)/[\w./-]*", word):
                yield word
            elif re.fullmatch(r"[\w./-]+\.(?:py|c|h|toml|md)", word):
                yield word


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_path_exists(page: Path) -> None:
    for name in named_paths(page.read_text("utf-8")):
        assert any((folder / name).exists() for folder in BASES), f"{page.name}: {name}"


def named_tests(text: str) -> list[tuple[str, str]]:
    """The file and the name of each test that a page names, as pytest writes them."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


def is_test(file: str, name: str) -> bool:
    path = ROOT / file
    return path.exists() and f"\ndef {name}(" in path.read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_test_that_is_named_exists(page: Path) -> None:
    for file, name in named_tests(page.read_text("utf-8")):
        assert name.startswith("test_") and is_test(file, name), f"{page.name}: {file}::{name}"


def test_a_test_that_is_not_there_is_found() -> None:
    gone = "`tests/test_docs.py::test_gone` and `tests/gone.py::test_the_readme_is_one_page`"
    assert [is_test(*one) for one in named_tests(gone)] == [False, False]
    assert is_test("tests/test_docs.py", "test_a_test_that_is_not_there_is_found")


def test_the_table_of_what_runs_a_step_is_whole() -> None:
    """Every backend, device, precision, rule and kernel has a cell with a test, or says none."""
    page = (ROOT / "docs/how-a-step-works.md").read_text("utf-8")
    part = page.partition("### Which backend runs")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ") and "---" not in line]
    wanted = {"TorchStep", "NativeStep", "CudaGraphStep", "CPU", "CUDA", "MPS"}
    wanted |= {*PRECISIONS} - {"auto"} | {*ACCEPTANCE_NAMES} - {"exact"} | {*TRIED}
    assert not [name for name in wanted if not any(name in row for row in rows)]
    for device, *_, by, test in (row.strip("| ").split(" | ") for row in rows[1:14]):
        assert by.strip("`") in wanted and ("tests/" in test or device == "MPS"), test


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_is_one_that_the_program_takes(page: Path) -> None:
    text = page.read_text("utf-8")
    if page.name == "CHANGELOG.md":  # earlier releases had other commands
        text = re.split(r"^## ", text, flags=re.M)[1]
    for command in commands(text):
        assert not wrong(command), f"{page.name}: {wrong(command)}"


@pytest.mark.parametrize(
    "line",
    [
        "frobnicate",
        "generate --promt x",
        "models fetch ID",
        "bench --studdy x",
        "bench --study no-such",
        "--no-such",
    ],
)
def test_a_command_that_is_not_there_is_found(line: str) -> None:
    assert wrong(line.split())


def test_commands_are_found_in_blocks_and_in_text() -> None:
    block = "```\nmedusa-chat generate --prompt T | --raw\n    --json\n```"
    text = f"as `medusa-chat doctor` says\n{block}"
    assert commands(text) == [["doctor"], ["generate", "--prompt", "T", "--raw", "--json"]]


def test_a_path_that_is_not_there_is_found() -> None:
    text = "`python assets/gone.py --json`, `gone.py` and `presets/gone/`"
    names = list(named_paths(text))
    assert names == ["assets/gone.py", "gone.py", "presets/gone/"]
    assert not any((folder / name).exists() for folder in BASES for name in names)


def test_the_pages_are_in_the_source_distribution() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]
    included = hatch["build"]["targets"]["sdist"]["only-include"]
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs"} <= set(included)


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_every_page_of_docs_is_linked_from_the_readme_or_from_contributing() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")]
    for page in ROOT.glob("docs/*.md"):
        assert any(f"docs/{page.name}" in text for text in texts), page.name


def test_the_changelog_begins_with_this_version() -> None:
    from medusa_chat import __version__

    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert heads[0] == __version__
