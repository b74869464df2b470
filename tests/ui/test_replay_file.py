"""An answer as one HTML file: what it holds, and that no text in it can become anything else."""

import base64
import json
import re

import pytest
from support.conversations import ended, turn

from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.saved_file import ENTRY, ReplayFile, inlined
from medusa_chat.ui.page.shell import given, modules

EVIL = "</script><img src=x onerror=alert(1)>${1}{known}"


@pytest.fixture
def answer(chat) -> Answer:
    chat.ask(turn("hi"))
    ended(chat)
    return chat.answer


@pytest.fixture
def file(answer) -> ReplayFile:
    return ReplayFile.of(answer, EVIL, f"My {EVIL} title", 20.0, given())


def part(text: str, name: str) -> dict:
    found = re.search(rf'id="{name}">(.*?)</script>', text)
    assert found is not None
    return json.loads(found[1])


def test_the_file_has_every_step_and_its_text(file, answer):
    recorded = part(file.text, "recorded")
    assert len(recorded["steps"]) == len(answer.steps) == len(recorded["line"]["bars"])
    assert recorded["text"] == answer.text
    assert sum(recorded["line"]["lengths"]) + recorded["line"]["at"] <= len(answer.text)
    assert recorded["question"] == EVIL


def test_no_text_can_end_its_element(file):
    assert EVIL not in file.text
    assert file.text.count("</script>") == 4
    assert "onerror=alert(1)>" not in re.sub(r'id="recorded">.*?</script>', "", file.text)


def test_its_name_is_one_on_every_system(file):
    assert re.fullmatch(r"[\w ().,-]+\.html", file.name)


def test_every_module_that_is_imported_is_in_the_file():
    places = json.loads(inlined(ENTRY))["imports"]
    assert "medusa/tree.js" in places
    for address in places.values():
        code = base64.b64decode(address.partition(",")[2]).decode()
        named = re.findall(r'^(?:import|\}) (?:[^;]*?from )?"([^"]+)";', code, re.M)
        assert all(name in places for name in named)
    assert len(places) < len(modules())


def test_nothing_in_it_is_fetched(file):
    assert "default-src 'none'" in file.text
    assert not re.search(r'(?:src|href)="http', file.text)
