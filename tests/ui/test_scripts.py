"""The page's own modules: where they are, and that an old page never meets new ones."""

import json
import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from medusa_chat.paths import asset
from medusa_chat.ui.page.shell import IN_THE_PAGE, Shell, modules, script_head, version


@pytest.fixture
def client() -> TestClient:
    return TestClient(Shell(Starlette()))


def address(prefix: str = "") -> str:
    line = re.search(r'<script type="importmap">(.*?)</script>', script_head(prefix, {}))
    assert line is not None
    return json.loads(line[1])["imports"]["medusa/"]


def test_every_module_is_where_the_import_map_says_for_ever(client):
    for name, code in modules().items():
        answer = client.get(address() + name)
        assert answer.content == code
        assert answer.headers["content-type"].startswith("text/javascript")
        assert "immutable" in answer.headers["cache-control"]


@pytest.mark.parametrize("path", ["first.js", "../tree.js", "", "tree.js.map", "none.js"])
def test_nothing_else_is_there(client, path):
    assert client.get(address() + path).status_code == 404


def test_another_version_has_another_address_and_is_not_found(client):
    changed = modules() | {"tree.js": b"// another"}
    assert version(changed) != version(modules())
    assert client.get(f"/scripts/{version(changed)}/tree.js").status_code == 404


def test_the_path_behind_a_proxy_stands_before_the_address():
    assert address("/behind").startswith("/behind/scripts/")


def test_what_the_scripts_know_cannot_end_its_element():
    head = script_head("", {"RULES": "</script><b>"})
    assert "</script><b>" not in head
    known = re.search(r'id="known">(.*?)</script>', head)
    assert known is not None
    assert json.loads(known[1]) == {"RULES": "</script><b>"}


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_modules_that_are_there_by_relative_names(name):
    code = modules()[name].decode()
    named = re.findall(r'^import (?:[^;]*? from )?"([^"]+)";', code, re.M)
    assert len(named) == len(re.findall(r"^import\b", code, re.M))
    for other in named:
        assert other.startswith("./") and other.removeprefix("./") in modules()


def test_no_script_leaves_a_global():
    for file in asset("js").glob("*.js"):
        code = file.read_text(encoding="utf-8")
        assert not re.search(
            r"\b(window|globalThis|self)\.\w+\s*=[^=]",
            code.replace("window.fetch = ", "").replace("window.requestAnimationFrame = ", ""),
        ), file.name
    assert set(IN_THE_PAGE) <= {file.name for file in asset("js").iterdir()}
