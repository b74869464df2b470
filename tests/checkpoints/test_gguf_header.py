"""GGUF files are read to the byte, and what is wrong with one is told in one line before any other
library opens it."""

import struct

import gguf
import pytest
from support.gguf_models import ROWS, raw_gguf, text, texts, tiny_model, write_gguf

from medusa_chat.checkpoints.layouts.contents import survey
from medusa_chat.checkpoints.layouts.gguf_header import (
    MAX_TEMPLATE,
    TYPES,
    GgufReader,
    read_gguf,
    read_vocabulary,
)
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.errors import ModelError

WIDE = {"hidden_size": 256, "intermediate_size": 256}  # rows of one block of 256 weights


def number(value, form="I", kind=4):
    return kind, struct.pack(f"<{form}", value)


GOOD = {
    "general.architecture": (8, text("llama")),
    "tokenizer.ggml.model": (8, text("gpt2")),
    "tokenizer.ggml.tokens": texts(["a", "b"]),
    "tokenizer.ggml.eos_token_id": number(1),
}
ONE = {"token_embd.weight": ((32, 2), 0, 0)}
DATA = bytes(256)
LONG_TEMPLATE = (8, text("x" * (MAX_TEMPLATE + 1)))
BAD = {
    "magic": (b"GGML" + raw_gguf(GOOD, ONE, DATA)[4:], "does not begin with GGUF"),
    "web page": (b"<!DOCTYPE html><html>", "a web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    "empty": (b"", "is empty"),
    "version 1": (raw_gguf(GOOD, ONE, DATA, 1), "version 1"),
    "big-endian": (raw_gguf(GOOD, ONE, DATA, 3 << 24), "big-endian"),
    "cut in the header": (raw_gguf(GOOD, ONE, DATA)[:60], "cut short"),
    "cut in the data": (raw_gguf(GOOD, ONE, DATA)[:-1], "and the file at"),
    "tensors": (raw_gguf(GOOD, ONE, DATA, counts=(2**40, 3)), "claims 1099511627776 tensors"),
    "no tensors": (raw_gguf(GOOD, {}, DATA), "claims 0 tensors"),
    "keys": (raw_gguf(GOOD, ONE, DATA, counts=(1, 2**63)), "keys"),
    "long key": (raw_gguf(GOOD | {"k" * 400: number(1)}, ONE, DATA), "a key has 400 bytes"),
    "long text": (raw_gguf(GOOD | {"a": (8, text("", 2**62))}, ONE, DATA), "at most 1048576"),
    "text beyond": (raw_gguf(GOOD | {"a": (8, text("", 9000))}, ONE), "cut short, or a length"),
    "template": (
        raw_gguf(GOOD | {"tokenizer.chat_template": LONG_TEMPLATE}, ONE, DATA),
        "at most 65536",
    ),
    "array": (raw_gguf(GOOD | {"a": texts([], 2**60)}, ONE, DATA), "at most 4000000"),
    "array beyond": (raw_gguf(GOOD | {"a": texts([], 1_900_000)}, ONE, DATA), "bytes: at most"),
    "texts of several arrays": (
        raw_gguf({f"k{n}": texts([""] * 700_000) for n in range(3)}, ONE, DATA),
        "brings its texts to 2100000: at most 2000000",
    ),
    "vector in blocks": (raw_gguf(GOOD, {"t": ((32,), 8, 0)}, DATA), "a vector in blocks (Q8_0)"),
    "array of arrays": (
        raw_gguf(GOOD | {"a": (9, struct.pack("<IQ", 9, 1))}, ONE, DATA),
        "array of the unknown type 9",
    ),
    "value type": (raw_gguf(GOOD | {"a": (77, b"")}, ONE, DATA), "unknown type 77"),
    "not UTF-8": (raw_gguf(GOOD | {"a": (8, text(b"\xff"))}, ONE, DATA), "not UTF-8"),
    "dimensions": (raw_gguf(GOOD, {"t": ((1,) * 5, 0, 0)}, DATA), "5 dimensions"),
    "shape": (raw_gguf(GOOD, {"t": ((2**33, 2**33), 0, 0)}, DATA), "which its type cannot have"),
    "no rows": (raw_gguf(GOOD, {"t": ((32, 0), 0, 0)}, DATA), "which its type cannot have"),
    "block": (raw_gguf(GOOD, {"t": ((33,), 2, 0)}, DATA), "which its type cannot have"),
    "type": (raw_gguf(GOOD, {"t": ((32,), 99, 0)}, DATA), "unknown type 99"),
    "offset": (raw_gguf(GOOD, {"t": ((32,), 0, 8)}, DATA), "not a multiple of 32"),
    "beyond": (raw_gguf(GOOD, {"t": ((32,), 0, 256)}, DATA), "and the file at"),
    "overlap": (
        raw_gguf(GOOD, {"t": ((32,), 0, 0), "u": ((32,), 0, 32)}, DATA),
        "overlaps another",
    ),
    "alignment": (
        raw_gguf(GOOD | {"general.alignment": number(33)}, ONE, DATA),
        "not a power of two",
    ),
    "no tokenizer": (
        raw_gguf({"general.architecture": (8, text("llama"))}, ONE, DATA),
        "holds no tokenizer",
    ),
    "kind of tokenizer": (
        raw_gguf(GOOD | {"tokenizer.ggml.model": (8, text("bert"))}, ONE, DATA),
        "of the kind 'bert'",
    ),
    "token not UTF-8": (
        raw_gguf(GOOD | {"a": (9, struct.pack("<IQ", 8, 1) + text(b"\xff"))}, ONE, DATA),
        "is not UTF-8",
    ),
    "token id": (
        raw_gguf(GOOD | {"tokenizer.ggml.bos_token_id": number(2)}, ONE, DATA),
        "and it has 2 tokens",
    ),
    "kinds": (
        raw_gguf(
            GOOD | {"tokenizer.ggml.token_type": (9, struct.pack("<IQi", 5, 1, 3))}, ONE, DATA
        ),
        "kinds of 1",
    ),
    "family": (
        raw_gguf(GOOD | {"general.architecture": (8, text("rwkv7"))}, ONE, DATA),
        "of the family 'rwkv7'",
    ),
    "no sizes": (raw_gguf(GOOD, ONE, DATA), "no valid llama.embedding_length"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_and_exit_code_4(name, tmp_path, capsys):
    data, expected = BAD[name]
    file = tmp_path / "bad.gguf"
    file.write_bytes(data)
    reads = []

    class Counted(LocalFolder):
        def read(self, file: str, start: int, length: int) -> bytes:
            reads.append(length)
            return super().read(file, start, length)

    with pytest.raises(ModelError) as refusal:
        survey(Counted(tmp_path, only="bad.gguf"))
    assert len(reads) < 20, "no count that the file only claims is believed"
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


def test_no_byte_of_a_header_can_be_cut_or_changed_into_another_error(tmp_path):
    whole = write_gguf(tmp_path / "a.gguf", tiny_model()).read_bytes()
    end = read_gguf(LocalFolder(tmp_path), "a.gguf").tensors["token_embd.weight"].start
    (tmp_path / "a.gguf").unlink()
    file = tmp_path / "b.gguf"
    for place in range(0, end, 29):
        for changed in (whole[:place], whole[:place] + b"\xff" + whole[place + 1 :]):
            file.write_bytes(changed)
            try:
                survey(LocalFolder(tmp_path))
            except ModelError as error:
                assert "\n" not in str(error)


def test_the_header_is_that_which_gguf_reads(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**WIDE), "Q4_K")
    header = read_gguf(LocalFolder(tmp_path), "a.gguf")
    reader = gguf.GGUFReader(path)
    assert header.quantisation == "Q4_K" and header.metadata["tokenizer.ggml.tokens"] == ROWS
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        found = header.tensors[tensor.name]
        assert found.shape == tuple(reversed([int(n) for n in tensor.shape]))
        assert (found.type, found.start, found.bytes) == (
            int(tensor.tensor_type),
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
    for key, value in header.metadata.items():
        if isinstance(value, str | float) or key.endswith(("count", "length")):
            assert reader.fields[key].contents() == value


def test_types_are_those_of_gguf():
    for kind, (name, weights, length) in TYPES.items():
        known = gguf.GGMLQuantizationType(kind)
        assert (known.name, gguf.GGML_QUANT_SIZES[known]) == (name, (weights, length))
        assert name in ("F32", "F16", "I64") or known in gguf.quants._type_traits


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama__logit_scale": 2.0}, "llama.logit_scale, which is not supported"),
        ({"llama__expert_count": 8}, "no valid llama.expert_used_count"),
        ({"llama__block_count": 2**31}, "fewer tensors than llama.block_count"),
        ({"llama__block_count": 8}, "fewer tensors than llama.block_count"),
        ({"llama__attention__value_length": 4}, "values of another width"),
        ({"llama__rope__scaling__type": "su", "llama__rope__scaling__factor": 2.0}, "'su'"),
    ],
)
def test_what_is_not_read_of_a_model_is_refused(changes, expected, tmp_path):
    write_gguf(tmp_path / "a.gguf", tiny_model(), **changes)
    with pytest.raises(ModelError, match=expected):
        survey(LocalFolder(tmp_path))


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("granite", {"granite__rope__scaling__finetuned": False}, "has no rotary embedding"),
        ("granite", {"granite__attention__scale": 0.0}, "no valid granite.attention.scale"),
        ("glm4", {"glm4__rope__dimension_sections": [4, 4]}, "rope.dimension_sections, which"),
        (
            "cohere2",
            {"cohere2__attention__sliding_window_pattern": [True]},
            "no valid cohere2.attention.sliding_window_pattern",
        ),
        ("seed_oss", {"seed_oss__rope__dimension_count": 8}, "part of each head, 8 of 16 numbers"),
        (
            "ministral3",
            {"mistral3__rope__scaling__type": "none"},
            "by position, without YaRN",
        ),
    ],
)
def test_what_is_not_read_of_a_family_is_refused(family, changes, expected, tmp_path):
    write_gguf(tmp_path / "a.gguf", tiny_model(family), **changes)
    with pytest.raises(ModelError, match=expected):
        survey(LocalFolder(tmp_path))


def test_a_tensor_without_a_place_is_refused_and_a_missing_one_named(tmp_path):
    model = tiny_model()
    whole = write_gguf(tmp_path / "a.gguf", model).read_bytes()
    (tmp_path / "a.gguf").write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_UP.weight"))
    with pytest.raises(ModelError, match="no place for"):
        survey(LocalFolder(tmp_path))
    (tmp_path / "a.gguf").write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj"):
        survey(LocalFolder(tmp_path))


SIZES = {"b-Q4_K_M.gguf": 40, "b-Q8_0.gguf": 80, "b-f16.gguf": 160, "mmproj-b-Q8_0.gguf": 900}


def test_the_largest_quantised_of_several_is_read_and_told(tmp_path):
    from medusa_chat.gguf_files import choose_file, first_part, parts_of, split_name, whole_files

    chosen, why = choose_file(SIZES)
    assert (
        chosen == "b-Q8_0.gguf"
        and "reading b-Q8_0.gguf, the largest quantised of 3 GGUF files" in why
    )
    assert choose_file({"b-f16.gguf": 1, "b.bf16.gguf": 2, "x.bin": 3})[0] == "b.bf16.gguf"
    assert choose_file({"one.gguf": 1, "README.md": 2}) == ("one.gguf", "")
    assert choose_file({"mmproj-x.gguf": 1}) == (None, "")
    half = {"b-Q8_0-00001-of-00002.gguf": 6, "b-Q2_K.gguf": 10}
    assert choose_file(half) == ("b-Q2_K.gguf", "") and whole_files(half) == ["b-Q2_K.gguf"]
    chosen, why = choose_file(half | {"b-Q8_0-00002-of-00002.gguf": 6})
    assert chosen == "b-Q8_0-00001-of-00002.gguf" and "of 2 GGUF files" in why
    assert choose_file({"b-00002-of-00002.gguf": 6})[0] == "b-00001-of-00002.gguf"  # and it lacks
    below = {"BF16/b-BF16.gguf": 9, "Q2/b-Q2_K.gguf": 1, "Q4/b-Q4_K.gguf": 3}
    assert choose_file(below)[0] == "Q4/b-Q4_K.gguf"
    assert choose_file(below | {"b-Q2_K.gguf": 1}) == ("b-Q2_K.gguf", "")
    assert choose_file({"a/b/c.gguf": 1, "a/b/c/d.gguf": 2}) == ("a/b/c.gguf", "")
    parts = ("a/b-00001-of-00003.GGUF", "a/b-00002-of-00003.GGUF", "a/b-00003-of-00003.GGUF")
    assert all(parts_of(part) == parts and first_part(part) == parts[0] for part in parts)
    for name in ("b.gguf", "b-00001-of-00001.gguf", "b-00004-of-00003.gguf", "b-1-of-2.gguf", ""):
        assert parts_of(name) == (name,) == (first_part(name),)
    assert split_name("a/b/sub/c.GGUF") == ("a/b", "sub/c.GGUF")
    assert split_name("a/b") == ("a/b", None) and split_name("a/b.gguf") == ("a/b.gguf", None)


def read_of(words, path):
    path.write_bytes(raw_gguf(GOOD | {"tokenizer.ggml.tokens": texts(words)}, ONE, DATA))
    return read_vocabulary(LocalFolder(path.parent, only=path.name), path.name)


def test_a_vocabulary_is_read_whole_where_it_is_asked_for(tmp_path):
    """Lengths of any size, some of which are no ASCII, stand between its texts."""
    words = ["x" * length for length in (0, 1, 127, 128, 255, 256, 300, 65_536)] + [
        "\u2581\U0001f642"
    ]
    words = words * 40  # longer than a piece that is read at once
    assert read_of(words, tmp_path / "a.gguf")["tokenizer.ggml.tokens"] == words
    header = read_gguf(LocalFolder(tmp_path, only="a.gguf"), "a.gguf")
    assert header.metadata["tokenizer.ggml.tokens"] == len(words)


@pytest.mark.parametrize("length", [1, 100, 128, 200, 255])
def test_a_text_that_is_not_utf8_is_refused_whatever_its_length(length, tmp_path):
    """Also where its last character would go on in the length of the next."""
    for broken in (b"\xff" * length, b"x" * (length - 1) + b"\xc3", b"\x80" + b"x" * (length - 1)):
        data = struct.pack("<IQ", 8, 3) + text("a") + text(broken) + text("y" * 0xBF)
        file = tmp_path / "a.gguf"
        file.write_bytes(raw_gguf(GOOD | {"tokenizer.ggml.tokens": (9, data)}, ONE, DATA))
        for read in (read_gguf, read_vocabulary):
            with pytest.raises(ModelError, match="'tokenizer.ggml.tokens' is not UTF-8"):
                read(LocalFolder(tmp_path, only="a.gguf"), "a.gguf")


def test_a_token_more_is_no_call_more(tmp_path, monkeypatch):
    """A vocabulary has hundreds of thousands of texts: three calls for each took two seconds."""
    counts, take = [], GgufReader.take
    for words in (["a", "b"], ["a", "b"] * 3000):
        calls = []

        def counted(reader, length, calls=calls):
            calls.append(length)
            return take(reader, length)

        monkeypatch.setattr(GgufReader, "take", counted)
        read_of(words, tmp_path / "a.gguf")
        counts.append(len(calls))
    assert counts[0] == counts[1]
