"""GGUF files in the Models tab: those of other programs are found, looked at, loaded, and what
earlier versions made of them is deleted, by the owner alone."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.gguf_models import old_copy, tiny_model, write_gguf
from support.scripted import ScriptedRunner
from support.waiting import wait_for

from medusa_chat.checkpoints import kept_copies
from medusa_chat.gguf_files import local_files
from medusa_chat.messages import LoadPhase, LoadRequest
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import GUEST
from medusa_chat.ui.models.controller import ModelsController
from medusa_chat.ui.models.load_form import LoadChoices
from medusa_chat.ui.models.view import ModelsTab
from medusa_chat.ui.page.status import phase_text, status_line
from medusa_chat.units import gb

OWNER = SimpleNamespace(headers={}, username=None)
VISITOR = SimpleNamespace(headers={}, username=GUEST)
BOXES = ("", "", "auto", "auto")


class Loader(ScriptedRunner):
    """A runner that unpacks what it loads."""

    def load(self, request):
        self.loaded = [*getattr(self, "loaded", []), request.checkpoint]
        yield LoadPhase("read")
        note = "tiny.gguf (Q8_0, 1 MB) is unpacked to fp32 in memory, which takes 2 MB"
        yield LoadPhase("read", note=note)
        yield LoadPhase("ready", self.model)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with files of both programs, and what is no model of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    model = tiny_model()
    write_gguf(tmp_path / ".lmstudio/models/them/tiny-GGUF/tiny-Q8_0.gguf", model, "Q8_0")
    write_gguf(tmp_path / ".cache/llama.cpp/them_tiny_tiny-Q4_0.gguf", model, "Q4_0")
    for name in ("mmproj-tiny.gguf", "big-00001-of-00003.gguf", "notes.txt", ".hidden.gguf.part"):
        (tmp_path / ".lmstudio/models/them/tiny-GGUF" / name).write_bytes(b"x")
    os.symlink(tmp_path / "nowhere.gguf", tmp_path / ".cache/llama.cpp/broken.gguf")
    os.symlink(tmp_path, tmp_path / ".cache/llama.cpp/loop")
    return tmp_path


@pytest.fixture
def controller(home):
    session = Session(Loader())
    session.submit(LoadRequest())
    wait_for(lambda: session.state.status == "ready" and session.lifecycle.loaded)
    made = ModelsController(session)
    yield made
    session.close()


def event(**data):
    return SimpleNamespace(_data=data)


def row_of(controller, name, text=""):
    """The row of a file once it was looked at. text: what is typed."""
    tab, found = ModelsTab(text=text), {}  # nobody types any more

    def is_there():
        controller.refresh(tab, OWNER, text, *BOXES[1:])
        rows = {Path(row["id"]).name: row for row in json.loads(tab.shown[1])["rows"]}
        found.update(rows.get(name, {}))
        return found.get("memory") or found.get("problem")

    wait_for(is_there)
    return found


def names_shown(controller, text):
    tab = ModelsTab(text=text)
    controller.refresh(tab, OWNER, text, *BOXES[1:])
    return {Path(row["id"]).name for row in json.loads(tab.shown[1])["rows"]}


def test_files_of_lm_studio_and_llama_cpp_are_found_by_name(home):
    found = {Path(file.path).name: file for file in local_files()}
    assert {name: file.app for name, file in found.items()} == {
        "tiny-Q8_0.gguf": "LM Studio",
        "them_tiny_tiny-Q4_0.gguf": "llama.cpp",
    }
    for file in found.values():
        assert file.bytes == Path(file.path).stat().st_size


def test_a_split_file_is_one_row_with_the_bytes_of_all_its_parts(controller, home):
    folder = home / ".lmstudio/models/them/split-GGUF"
    first = write_gguf(folder / "a.gguf", tiny_model(), "Q8_0", split=5)
    size = sum(part.stat().st_size for part in folder.iterdir())
    assert [f.bytes for f in local_files() if f.path == str(first)] == [size]
    facts = dict(row_of(controller, first.name)["facts"])
    assert facts["GGUF"] == f"Q8_0, {gb(size)}"
    assert not {p.name for p in folder.iterdir()} & names_shown(controller, "00002-of")


def test_rules_of_splitting_text_that_are_not_known_stand_in_the_row(controller, home):
    told = {"tokenizer__ggml__pre": "brand-new"}
    path = write_gguf(home / ".lmstudio/models/new.gguf", tiny_model(), **told)
    assert "rules called 'brand-new'" in dict(row_of(controller, path.name)["facts"])["note"]


def test_the_cache_of_llama_cpp_may_lie_elsewhere(home, monkeypatch):
    write_gguf(home / "elsewhere" / "other.gguf", tiny_model())
    monkeypatch.setenv("LLAMA_CACHE", str(home / "elsewhere"))
    assert [Path(file.path).name for file in local_files()][-1] == "other.gguf"


def test_they_have_rows_with_memory_and_type_before_any_click(controller):
    row = row_of(controller, "tiny-Q8_0.gguf")
    facts = dict(row["facts"])
    assert (row["group"], row["title"], row["is_here"]) == ("gguf", "tiny-Q8_0.gguf", True)
    assert facts["of"] == "LM Studio" and facts["GGUF"].startswith("Q8_0, ")
    assert row["memory"][0]["precision"] == "Q8_0" and "old copy" not in facts
    assert "nf4" not in {cell["precision"] for cell in row["memory"]}
    assert row["download"] == "nothing to download" and not row["delete"]
    assert facts["heads"] == "none: prompt-lookup"


def test_a_path_that_is_typed_has_a_row_and_words_filter_the_files(controller, home):
    path = str(home / ".cache/llama.cpp/them_tiny_tiny-Q4_0.gguf")
    assert row_of(controller, "them_tiny_tiny-Q4_0.gguf", path)["group"] == "typed"
    assert LoadChoices("them/tiny/file.gguf").names_one and LoadChoices(path).names_one
    wait_for(lambda: "them_tiny_tiny-Q4_0.gguf" in names_shown(controller, "llama.cpp"))
    assert "tiny-Q8_0.gguf" not in names_shown(controller, "llama.cpp")
    missing = row_of(controller, "no.gguf", str(home / "no.gguf"))
    assert "there is no file" in missing["problem"] and missing["is_refused"]


def test_a_broken_file_says_so_in_its_row(controller, home):
    file = home / ".cache/llama.cpp/them_tiny_tiny-Q4_0.gguf"
    file.write_bytes(file.read_bytes()[:-32])
    row = row_of(controller, "them_tiny_tiny-Q4_0.gguf")
    assert "ends at byte" in row["problem"] and row["is_refused"]


def test_a_click_loads_the_file_and_tells_what_it_unpacks(controller, home):
    path = str(home / ".lmstudio/models/them/tiny-GGUF/tiny-Q8_0.gguf")
    controller.load_model(ModelsTab(), event(id=path), OWNER, *BOXES)
    wait_for(lambda: controller.picker.progress.stage == "done")
    assert controller.view.session.runner.loaded[-1] == path
    state = ModelState("loading", "read", note="unpacking a.gguf")
    assert phase_text(state) == "unpacking a.gguf"
    assert "a.gguf" in status_line(state)
    assert "a.gguf" not in status_line(state, is_guest=True)


def test_an_old_conversion_is_deleted_and_the_file_stays(controller, home, told):
    path = home / ".lmstudio/models/them/tiny-GGUF/tiny-Q8_0.gguf"
    old_copy(path)
    row = row_of(controller, "tiny-Q8_0.gguf")
    assert row["delete"].startswith("Delete copy: ") and "the model itself stays" in row["deletion"]
    assert "converted by an earlier version" in dict(row["facts"])["old copy"]
    controller.drop_model(ModelsTab(), event(id=str(path)), OWNER, *BOXES)
    assert " freed." in told[0][1] and path.is_file() and not kept_copies.kept()
    assert not row_of(controller, "tiny-Q8_0.gguf")["delete"]


def test_a_copy_whose_file_is_gone_is_listed_and_can_be_deleted(controller, home):
    path = home / "gone.gguf"
    write_gguf(path, tiny_model())
    old_copy(path)
    path.unlink()
    row = row_of(controller, "gone.gguf")
    assert row["group"] == "here" and row["delete"] and "there is no file" in row["problem"]
    controller.drop_model(ModelsTab(), event(id=str(path)), OWNER, *BOXES)
    assert not kept_copies.kept()


def test_what_is_in_use_and_what_is_no_copy_is_not_deleted(controller, home, monkeypatch, told):
    path = home / ".cache/llama.cpp/them_tiny_tiny-Q4_0.gguf"
    old_copy(path)
    monkeypatch.chdir(path.parent)
    controller.load_model(ModelsTab(), event(id=f"./{path.name}"), OWNER, *BOXES)
    wait_for(lambda: controller.picker.progress.stage == "done")
    controller.drop_model(ModelsTab(), event(id=str(path)), OWNER, *BOXES)
    assert "is in use" in told[0][1] and kept_copies.kept()
    controller.drop_model(ModelsTab(), event(id=str(home)), OWNER, *BOXES)
    assert "choose one of" in told[1][1] and path.is_file()


def test_a_guest_sees_no_file_and_deletes_nothing(controller, home):
    path = home / ".lmstudio/models/them/tiny-GGUF/tiny-Q8_0.gguf"
    old_copy(path)
    row_of(controller, path.name)  # the owner has looked
    for hit in (
        controller.refresh(ModelsTab(), VISITOR, *BOXES),
        controller.refresh(ModelsTab(), VISITOR, str(path), *BOXES[1:]),
        controller.drop_model(ModelsTab(), event(id=str(path)), VISITOR, *BOXES),
        controller.load_model(ModelsTab(), event(id=str(path)), VISITOR, *BOXES),
    ):
        assert "gguf" not in hit[1] and json.loads(hit[1])["rows"] == []
    assert kept_copies.kept() and controller.view.session.runner.loaded == ["demo"]
