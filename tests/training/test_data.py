"""What can be trained on: every kind of row, its labels, and packing that keeps rows apart."""

import errno
import json
import sys
from pathlib import Path

import pytest
from support.training_models import (
    LETTERS,
    conversations,
    letter_tokenizer,
    write_rows,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_chat.errors import UsageError
from medusa_chat.hub import HubError
from medusa_chat.hub.dataset import chosen_files, dataset_files
from medusa_chat.training.conversations import Conversation, read_conversations
from medusa_chat.training.examples import (
    Example,
    collate,
    encode,
    encode_all,
    encode_prompt,
    split,
)


def conversations_in(path: Path, prompts: bool = False) -> tuple[Conversation, ...]:
    return read_conversations(path, prompts).conversations


ASKED, ANSWERED = "ab", "cde"
KINDS = {
    "messages": {"messages": conversations(1)[0]["messages"][:2]},
    "conversations by role": {
        "conversations": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "c"}]
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}]
    },
    "ultrachat": {"id": "1", "data": [ASKED, ANSWERED]},
    "alpaca": {"instruction": ASKED, "input": "", "output": ANSWERED},
    "text": {"text": ASKED},
}
PROMPTS = {
    "mt-bench": ({"question_id": 1, "turns": ["ab", "cd"]}, ("ab", "cd")),
    "alpaca-eval": ({"instruction": "ab", "output": "x", "generator": "y"}, ("ab",)),
    "prompt": ({"prompt": "ab"}, ("ab",)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_every_kind_of_row_is_read_with_its_place(tmp_path: Path, kind: str, suffix: str) -> None:
    file = tmp_path / f"data{suffix}"
    rows = [KINDS[kind], KINDS[kind]]
    lines = "\n".join(map(json.dumps, rows))
    file.write_text(lines if suffix == ".jsonl" else json.dumps(rows, indent=1), "utf-8")
    found = conversations_in(file)
    places = (":1", ":2") if suffix == ".jsonl" else (", row 1", ", row 2")
    assert [one.place for one in found] == [f"{file}{place}" for place in places]
    assert found[0].text or [m["role"] for m in found[0].messages] == ["user", "assistant"]


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompt_files_give_their_questions_in_order(tmp_path: Path, kind: str) -> None:
    row, asked = PROMPTS[kind]
    (found,) = conversations_in(write_rows(tmp_path / "p.jsonl", [row]), prompts=True)
    assert found.asked == asked


def test_half_a_character_is_no_reason_to_stop(tmp_path: Path) -> None:
    half = "b\ud83d"
    for row in (
        {"messages": [{"role": "user", "content": half}]},
        {"turns": [half]},
        {"prompt": half},
    ):
        (found,) = conversations_in(write_rows(tmp_path / "rows.jsonl", [row]), prompts=True)
        assert found.asked == ("b\ufffd",)
    (found,) = conversations_in(write_rows(tmp_path / "rows.jsonl", [{"text": half}]))
    assert found.text == "b\ufffd"


def line_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a token for two line breaks, which ChatML's template joins with an answer's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate([*letters, "ĊĊ"])}
    inner = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    made.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return made


@pytest.mark.parametrize("answer", ["\nyes", "\n\n\nyes", "\n", "yes"])
def test_an_answer_may_begin_with_a_blank_line(answer: str) -> None:
    tokenizer = line_tokenizer()
    turns = [("user", "hi"), ("assistant", answer), ("user", "so"), ("assistant", "no")]
    messages = [{"role": role, "content": content} for role, content in turns]
    example = encode(tokenizer, messages)
    assert tokenizer.decode(example.labels) == f"{answer}<|im_end|>no<|im_end|>"
    prompt = tuple(encode_prompt(tokenizer, messages[:1]))
    assert example.ids[: len(prompt)] == prompt and example.is_label.index(True) == len(prompt)


# As Qwen3's: only an answer that nothing follows shows that there was no reasoning.
REASONS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_where_the_template_rewrites_earlier_answers_each_is_an_example(tmp_path: Path) -> None:
    """Most conversations of several turns were left out."""
    tokenizer = line_tokenizer()
    tokenizer.chat_template = REASONS
    turns = [("user", "hi"), ("assistant", "yes"), ("user", "so"), ("assistant", "no")]
    rows = [{"messages": [{"role": r, "content": text} for r, text in turns]}, {"text": "as is"}]
    data = conversations_in(write_rows(tmp_path / "d.jsonl", rows))
    encoded = encode_all(tokenizer, data, 999, 999)
    first, second, _ = encoded.examples
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    thought = "<think>\n\n</think>\n\n"
    assert tokenizer.decode(first.ids) == f"{prompt}{thought}yes<|im_end|>\n"
    assert tokenizer.decode(first.labels) == f"{thought}yes<|im_end|>"
    later = "yes<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(second.ids) == f"{prompt}{later}{thought}no<|im_end|>\n"
    assert tokenizer.decode(second.labels) == f"{thought}no<|im_end|>"
    (note,) = encoded.notes
    assert note.startswith("1 rows give an example for each answer")
    training, held_out = split(encoded.examples, 0)
    assert not {e.place for e in training} & {e.place for e in held_out}


def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path) -> None:
    """Such a row was "the conversation is empty: type something"."""
    tokenizer, rows = line_tokenizer(), [{"messages": []}, {"messages": []}]
    for row, first in zip(rows, ("hello", ""), strict=True):
        row["messages"] = [{"role": "assistant", "content": first}] if first else []
        row["messages"] += [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes"},
        ]
    found = conversations_in(write_rows(tmp_path / "d.jsonl", rows))
    one, two = encode_all(tokenizer, found, 99, 999).examples
    assert one.labels == two.labels and tokenizer.decode(one.labels) == "yes<|im_end|>"
    assert "hello" in tokenizer.decode(one.ids)


def test_prompts_without_answers_are_no_training_data(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "p.jsonl", [{"turns": ["a", "b"]}])
    with pytest.raises(UsageError, match=r"p\.jsonl:1: .*--distill"):
        conversations_in(file)


def test_sharegpt_row_loses_what_comes_before_the_first_question(tmp_path: Path) -> None:
    turns = [("gpt", "x"), ("human", "a"), ("human", "b"), ("gpt", "c")]
    rows = [
        {"conversations": [{"from": who, "value": text} for who, text in turns]},
        {"conversations": []},
    ]
    (found,) = conversations_in(write_rows(tmp_path / "s.jsonl", rows))
    assert [m["content"] for m in found.messages] == ["a\n\nb", "c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"odd": 1}]', r"s\.json, row 1: a row needs"),
        ('[{"turns": ["a"]},\n {"odd" 1}]', r"s\.json:2: not JSON: Expecting ':'"),
        ('[{"turns": ["a"]}]\n[]', r"s\.json:2: not JSON: Extra data"),
        ("[" * 100_000, r"s\.json:1: not JSON: nested too deeply"),
        ("{oops", r"s\.json:1: not JSON"),
    ],
)
def test_a_bad_json_file_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "s.json"
    file.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=said):
        conversations_in(file, prompts=True)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "completion": ANSWERED},
        {"instruction": ASKED, "answer": ANSWERED},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": ASKED}]},
                {"role": "assistant", "content": [{"type": "text", "text": ANSWERED}]},
            ]
        },
    ],
)
def test_other_names_of_an_answer_are_read(tmp_path: Path, row: dict[str, object]) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps(row, indent=2), "utf-8")  # a single object
    (found,) = conversations_in(file)
    assert [message["content"] for message in found.messages] == [ASKED, ANSWERED]


def test_what_cannot_be_read_says_what_can(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b", "utf-8")
    with pytest.raises(UsageError, match="is a table: give JSON, JSONL, parquet or text"):
        conversations_in(tmp_path / "a.csv")
    row = {"messages": [{"role": "narrator", "content": "x"}]}
    with pytest.raises(
        UsageError, match="the role is 'narrator': give one of system, user, assistant"
    ):
        conversations_in(write_rows(tmp_path / "t.jsonl", [row]))


def test_plain_text_is_one_text_or_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text("abc\n\ndef\n", "utf-8")
    assert [found.text for found in conversations_in(file)] == ["abc\n\ndef\n"]
    assert [found.asked for found in conversations_in(file, True)] == [("abc",), ("def",)]


def test_parquet_without_pyarrow_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "d.parquet").touch()
    with pytest.raises(UsageError, match="pip install pyarrow"):
        conversations_in(tmp_path / "d.parquet")


# ------------------------------------------------------------------------------- encoding


def test_a_template_that_never_ends_is_refused_with_the_line_it_met(tmp_path: Path) -> None:
    """It ran in the process that trains, which only a kill ended."""
    tokenizer = letter_tokenizer()
    loop = "{% for i in range(99999) %}"
    tokenizer.chat_template = f"{loop}{loop}{{% endfor %}}{{% endfor %}}"
    found = conversations_in(write_rows(tmp_path / "d.jsonl", conversations(1)))
    with pytest.raises(UsageError, match=r"d\.jsonl:1: the chat template of this checkpoint"):
        encode_all(tokenizer, found, 64, 99)


def encoded(rows: list[dict], tmp_path: Path, length: int = 64, vocabulary: int = 99):
    found = conversations_in(write_rows(tmp_path / "d.jsonl", rows))
    return encode_all(letter_tokenizer(), found, length, vocabulary)


REFUSES = "{% if 'j' in messages[0]['content'] %}{{ raise_exception('no j') }}{% endif %}"


def test_a_row_that_the_template_refuses_is_left_out_and_said(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = REFUSES + tokenizer.chat_template
    rows = conversations(3)
    rows[1]["messages"][0]["content"] = "j"
    found = conversations_in(write_rows(tmp_path / "d.jsonl", rows))
    encoded = encode_all(tokenizer, found, 64, 99)
    assert [example.place[-2:] for example in encoded.examples] == [":1", ":3"]
    (note,) = encoded.notes
    assert note.startswith("1 of 3 conversations left out; the first: ")
    assert "d.jsonl:2: the chat template refuses this conversation: no j" in note
    with pytest.raises(UsageError, match=r"d\.jsonl:2: the chat template refuses.*no j"):
        encode_all(tokenizer, found[1:2], 64, 99)


def test_long_row_is_cut_and_a_row_without_answer_in_reach_is_left_out(tmp_path: Path) -> None:
    rows = conversations(2)
    rows[1]["messages"][0]["content"] = LETTERS * 3
    found = encoded(rows, tmp_path, length=30)
    assert [len(example.ids) for example in found.examples] == [30]
    cut, skipped = found.notes
    assert cut == "2 rows are cut to 30 tokens" and skipped.startswith("1 rows are skipped: ")


def test_data_without_any_answer_in_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no usable example"):
        encoded([{"messages": conversations(1)[0]["messages"]}], tmp_path, length=5)


def test_token_beyond_the_vocabulary_names_its_row(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"d\.jsonl:1: the tokenizer gives token"):
        encoded(conversations(1), tmp_path, vocabulary=8)


def test_held_out_conversations_are_not_learnt() -> None:
    for count in (2, 3, 100, 10_000):
        rows = [
            Example((n, turn), (True,) * 2, f"row {n}") for n in range(count) for turn in (1, 2)
        ]
        learnt, held_out = split(rows, 0)
        assert sorted(e.ids for e in learnt + held_out) == [e.ids for e in rows]
        places = {e.place for e in held_out}
        assert len(places) == {2: 1, 3: 1, 100: 8, 10_000: 128}[count]
        assert not places & {e.place for e in learnt}


def test_plain_text_is_learnt_in_parts_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text(LETTERS * 4, "utf-8")
    found = encode_all(letter_tokenizer(None), conversations_in(file), 20, 99)
    assert [len(e.ids) for e in found.examples] == [20, 20, 20, 4]
    assert all(all(e.is_label) for e in found.examples) and not found.notes
    assert len({e.place for e in found.examples}) == 4
    learnt, held_out = split(found.examples, 0)
    assert len(held_out) == 1 and not set(held_out) & set(learnt), "of one text too"


def test_the_seed_chooses_what_is_held_out() -> None:
    rows = [Example((n,), (True,), f"row {n}") for n in range(100)]
    assert split(rows, 0)[1] == split(rows, 0)[1] != split(rows, 1)[1]


def test_neither_padding_nor_a_first_token_is_a_label() -> None:
    batch = collate([Example((3, 4, 5), (True,) * 3), Example((6,), (True,))])
    assert batch.ids.tolist() == [[3, 4, 5], [6, 0, 0]]
    assert batch.is_label.tolist() == [[False, True, True], [False] * 3]


# ---------------------------------------------------------------------------------- hub


def test_of_a_data_set_only_what_is_for_training_is_read() -> None:
    ultrachat = ["README.md", "data/test_sft-0.parquet", "data/train_sft-0.parquet"]
    assert chosen_files(ultrachat) == ["data/train_sft-0.parquet"]
    plain = ["ShareGPT_V4.json", "dataset_infos.json", "LICENSE.txt", "b.jsonl"]
    assert chosen_files(plain) == ["ShareGPT_V4.json", "b.jsonl"]


def test_name_that_is_no_data_set_is_refused_without_the_network() -> None:
    with pytest.raises(HubError, match="not a dataset id"):
        dataset_files("owner/..")
    with pytest.raises(HubError, match="network is disabled"):
        dataset_files("owner/never-fetched")


def test_a_data_set_that_the_disk_does_not_take_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(HubError, match="cannot write to .*hub .No space left.*set HF_HOME"):
        dataset_files("owner/name/file.jsonl")
