"""The package: what is in the wheel, and that it decodes from there with the demo checkpoint."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from medusa_chat import __version__

ROOT = Path(__file__).parent.parent


def build(folder: Path) -> Path:
    """The wheel of this checkout, made without the network."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    result = subprocess.run([*command, str(ROOT)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, in a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True)
    return folder


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    """stdout of a Python that sees the installed wheel before any checkout."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def shipped(folder: str) -> set[str]:
    """Files of a top-level folder that belong in the wheel."""
    files = (file.relative_to(ROOT).as_posix() for file in (ROOT / folder).rglob("*"))
    left_out = re.compile(
        r"assets/benchmarks/|assets/demo/\.build/|screenshot|__pycache__|_cache/|\.pyc$"
    )
    return {name for name in files if (ROOT / name).is_file() and not left_out.search(name)}


def test_wheel_holds_assets_and_presets_and_nothing_odd(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"medusa_chat/{name}" for name in shipped("assets") | shipped("presets")}
    assert expected
    assert expected <= names
    inside = {name for name in names if ".dist-info/" not in name} - expected
    assert inside == shipped("medusa_chat")
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_decodes_with_the_demo_checkpoint(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "-c", "from medusa_chat import paths; print(paths.asset())")
    assert Path(where.strip()) == installed.resolve() / "medusa_chat" / "assets"
    options = ["--prompt", "hello", "--max-new-tokens", "8", "--tree", "sparse-8", "--json"]
    out = run(installed, tmp_path, "-m", "medusa_chat", "generate", *options)
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in (events[0], events[-1])] == ["prefilled", "finished"]
    assert events[0]["model"] == "demo"
    assert events[0]["settings"]["drafter"] == "auto"
    assert 1 <= len(events[-1]["token_ids"]) <= 8
    texts = [event["text"] for event in events[:-1]]
    assert "".join(texts) + events[-1]["tail"] == events[-1]["text"]


def test_version_is_written_once(wheel: Path) -> None:
    assert wheel.name == f"medusa_chat-{__version__}-py3-none-any.whl"


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    asked = project["dependencies"] + project["optional-dependencies"]["test"]
    assert {re.split("[><=]", line)[0].lower() for line in asked} <= set(pins)
    assert pins["torch"] == "2.13.0"


def test_readme_and_ci_run_the_same_test_command() -> None:
    line = "pip install -c constraints.txt -e '.[test]' && pytest -n auto --dist loadfile"
    assert f"\n{line} && exit\n" in (ROOT / ".ci/run").read_text("utf-8")
    assert line in (ROOT / "README.md").read_text("utf-8")


def test_no_machine_path_and_no_registry_host_is_written_down() -> None:
    for name in ("pyproject.toml", "constraints.txt", ".ci/run"):
        text = (ROOT / name).read_text("utf-8")
        found = re.search(r"https?://|--index|file:|/home/|/work/|/Users/|(?<![\w.])/opt/", text)
        assert found is None, f"{name}: {found}"
