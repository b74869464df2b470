"""The formats of training data: what is text of a turn is read, and the rest is counted."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.training_models import write_rows

from medusa_chat.training.conversations import read_conversations

ASKED, ANSWERED = "ab", "cde"
HEARD = {"role": "user", "content": ASKED}
SAID = {"role": "assistant", "content": ANSWERED}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMS: list[dict[str, Any]] = [
    {"prompt": [HEARD], "completion": [SAID]},
    {"prompt": [HEARD], "completion": ANSWERED},
    {"prompt": [HEARD], "chosen": [SAID], "rejected": [HEARD]},
    {"prompt": ASKED, "chosen": [HEARD, SAID], "rejected": [HEARD]},
    {"chosen": [HEARD, SAID], "rejected": [HEARD]},
    {"input": ASKED, "output": ANSWERED},
    {"question": ASKED, "answer": ANSWERED},
    {"query": ASKED, "response": ANSWERED},
    {"instruction": ASKED, "input": None, "output": ANSWERED},
    {"instruction": "", "input": ASKED, "output": ANSWERED},
    {"conversation": [HEARD, SAID], "turn": 1},
    {"turns": [HEARD, SAID]},
]


@pytest.mark.parametrize("row", FORMS)
def test_every_common_form_of_a_question_and_its_answer_is_read(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    read = read_conversations(write_rows(tmp_path / "r.jsonl", [row]))
    assert list(read.conversations[0].messages) == [HEARD, SAID] and not read.notes


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "developer", "content": "x"}, HEARD, SAID]},
        {"system": "x", "conversations": [HEARD, SAID]},
        {"system_prompt": "x", "question": ASKED, "response": ANSWERED},
    ],
)
def test_a_system_prompt_is_read_by_whatever_name(tmp_path: Path, row: dict[str, Any]) -> None:
    (found,) = read_conversations(write_rows(tmp_path / "r.jsonl", [row])).conversations
    assert list(found.messages) == [{"role": "system", "content": "x"}, HEARD, SAID]


def test_of_calls_of_tools_the_text_is_read_and_the_rest_is_counted(tmp_path: Path) -> None:
    with_tools = [
        HEARD,
        {"role": "assistant", "content": "look", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "18"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "19"},
        SAID,
    ]
    by_name = [
        {"from": "human", "value": ASKED},
        {"from": "function_call", "value": "{}"},
        {"from": "observation", "value": "18"},
        {"from": "gpt", "value": ANSWERED},
    ]
    with_pictures = [  # an answer to a picture alone is none to what was asked before
        *(HEARD, SAID, {"role": "user", "content": [{"type": "image"}]}, SAID),
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": ["c", {"type": "thinking", "thinking": "x"}]},
    ]
    rows = [{"messages": with_tools}, {"conversations": by_name}, {"messages": with_pictures}]
    read = read_conversations(write_rows(tmp_path / "tools.jsonl", rows))
    assert [[message["content"] for message in one.messages] for one in read.conversations] == [
        [ASKED, f"look\n\n{ANSWERED}"],
        [ASKED, ANSWERED],
        [ASKED, ANSWERED, "b", "c"],
    ]
    assert read.notes == (
        "messages of tools.jsonl without text are left out: 2 of tool, 2 of assistant, "
        "1 of function_call, 1 of observation, 1 of user",
    )


def test_a_line_that_is_no_text_costs_no_other(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    whole = json.dumps({"messages": [HEARD, SAID]}).encode()
    file.write_bytes(b"\xef\xbb\xbf" + whole + b'\r\n{"text": "\xff"}\n[\n' + whole)
    read = read_conversations(file)
    assert [one.place for one in read.conversations] == [f"{file}:1", f"{file}:4"]
    assert read.notes == (
        f"2 of 4 rows of d.jsonl left out; the first: {file}:2: not UTF-8 text: invalid start byte",
    )


def test_the_exports_of_chat_programs_are_read_as_they_were_shown(tmp_path: Path) -> None:
    said = {"author": {"role": "user"}, "content": {"content_type": "text", "parts": [ASKED]}}
    tool = {"author": {"role": "tool"}, "content": {"content_type": "code", "text": "x"}}
    answer = {
        "author": {"role": "assistant"},
        "content": {"content_type": "text", "parts": [ANSWERED]},
    }
    mapping = {
        "q": {"message": said, "parent": None, "children": ["old", "t"]},
        "old": {"message": answer, "parent": "q", "children": []},
        "t": {"message": tool, "parent": "q", "children": ["a"]},
        "a": {"message": answer, "parent": "t", "children": []},
    }
    reasoned = f'<details type="reasoning" done="true">\n> so\n</details>\n{ANSWERED}'
    nodes = {
        "q": {**HEARD, "parentId": None, "childrenIds": ["a", "b"]},
        "a": {**SAID, "content": reasoned, "parentId": "q", "childrenIds": []},
        "b": {**SAID, "content": "other", "parentId": "q", "childrenIds": []},
    }
    chat = {"params": {"system": "Be brief."}, "history": {"messages": nodes, "currentId": "a"}}
    file = tmp_path / "export.json"
    rows = [{"mapping": mapping, "current_node": "a"}, {"chat": chat}, chat, {"mapping": []}]
    rows.append({"messages": [HEARD, SAID], "mapping": {}})  # no export
    file.write_text(json.dumps(rows), "utf-8")
    read = read_conversations(file)
    one, two, three, four = (list(found.messages) for found in read.conversations)
    assert one == four == [HEARD, SAID]
    assert two == three == [{"role": "system", "content": "Be brief."}, HEARD, SAID]
    assert "1 of 5 rows" in read.notes[0] and "1 of tools, pictures" in read.notes[1]


def test_an_answer_to_a_picture_in_an_export_is_none_to_what_was_asked_before(
    tmp_path: Path,
) -> None:
    def node(at: int, role: str, part: Any) -> dict[str, Any]:
        content = {"content_type": "multimodal_text", "parts": [part]}
        message = {"author": {"role": role}, "content": content}
        return {"message": message, "parent": str(at - 1), "children": [str(at + 1)]}

    said = (ASKED, ANSWERED, {"image": "x"}, "a cat", "b", "c")
    nodes = {str(n): node(n, ("user", "assistant")[n % 2], part) for n, part in enumerate(said)}
    read = read_conversations(write_rows(tmp_path / "d.jsonl", [{"mapping": nodes}]))
    assert [one["content"] for one in read.conversations[0].messages] == [ASKED, ANSWERED, "b", "c"]
    assert read.notes == (
        "messages of d.jsonl without text are left out: 2 of tools, pictures or hidden",
    )


def containers(value: object) -> Iterator[Any]:
    if isinstance(value, dict | list) and value:
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from containers(one)


def test_any_value_in_any_place_of_a_row_leaves_out_that_row_at_most(tmp_path: Path) -> None:
    """No other error, whatever stands where."""
    chance = random.Random(7)
    deep = json.loads("[" * 900 + "]" * 900)
    odd = [None, True, -1, 1.5, "", "x", [], {}, [[]], {"a": 1}, deep, "\ud800\0", "tool"]
    good = [*FORMS, {"messages": [HEARD, SAID]}, {"text": "x"}, {"mapping": {"a": {"message": {}}}}]
    rows = []
    for number in range(300):
        row = json.loads(json.dumps(good[number % len(good)]))
        place = chance.choice(list(containers(row)))
        at = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place[at] = chance.choice(odd)
        rows.append(row)
    for prompts in (False, True):
        read = read_conversations(write_rows(tmp_path / "d.jsonl", rows), prompts)
        assert 20 < len(read.conversations) < 300
        for found in read.conversations:
            assert found.asked if prompts else found.text or found.messages
            assert all(isinstance(one["content"], str) for one in found.messages)
        assert all(note.isprintable() and len(note) < 500 for note in read.notes)
