"""Text made of token ids: whole characters and stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import byte_fallback_tokenizer, byte_tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from medusa_chat.decoding.detokenizer import TextStream, TokenTexts

LEVEL, FALLBACK = byte_tokenizer(), byte_fallback_tokenizer()
KINDS = pytest.mark.parametrize("tokenizer", [LEVEL, FALLBACK], ids=["level", "fallback"])
NAMES = bytes_to_unicode()
# bytes that begin, continue and break characters
BYTES = [0x0A, 0x20, 0x41, 0x80, 0x82, 0x9F, 0xA9, 0xAC, 0xC3, 0xE2, 0xED, 0xF0, 0xFF]
RUNS = st.lists(st.sampled_from([*BYTES, "ab", "\u2581a", "\u2581"]), max_size=24)


def ids_of(text, tokenizer=LEVEL):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def ids_of_run(run, tokenizer):
    """Token ids of bytes and, in the vocabulary that has such, of pieces of text."""
    if tokenizer is LEVEL:
        run = [byte for byte in run if isinstance(byte, int)]
    names = [NAMES[b] if tokenizer is LEVEL else f"<0x{b:02X}>" if b in BYTES else b for b in run]
    return tokenizer.convert_tokens_to_ids(names)


def pieces_of(tokenizer, ids, stop=()):
    stream = TextStream(TokenTexts(tokenizer), stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.is_stopped:
            break
    return [*pieces, stream.tail()]


@KINDS
@given(st.text(max_size=40))
def test_pieces_join_to_the_text_and_are_whole_characters(tokenizer, text):
    pieces = pieces_of(tokenizer, ids_of(text, tokenizer))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@given(RUNS)
def test_bytes_in_any_order_join_to_what_the_tokenizer_decodes(run):
    ids = ids_of_run(run, LEVEL)
    assert "".join(pieces_of(LEVEL, ids)) == LEVEL.decode(ids)


@given(RUNS)
def test_of_byte_fallback_each_stray_byte_is_one_mark_and_characters_stand(run):
    """The tokenizer marks every byte of a run with a stray one; text that was shown cannot go. The
    right text is Python's own: a byte that it cannot decode is one mark."""
    ids = ids_of_run(run, FALLBACK)
    expected, data = "", b""
    for one in [*run, ""]:
        if isinstance(one, int):
            data += bytes([one])
            continue
        marked = data.decode("utf-8", "surrogateescape")
        expected += "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in marked)
        expected, data = expected + one.replace("\u2581", " "), b""
    expected = expected.removeprefix(" ")
    assert "".join(pieces_of(FALLBACK, ids)) == expected
    if "\ufffd" not in expected:
        assert expected == FALLBACK.decode(ids)


@KINDS
@given(RUNS)
def test_what_is_held_back_is_less_than_a_character(tokenizer, run):
    ids = ids_of_run(run, tokenizer)
    stream, shown = TextStream(TokenTexts(tokenizer)), ""
    for place, token in enumerate(ids):
        shown += stream.push(token)
        whole = "".join(pieces_of(tokenizer, ids[: place + 1]))
        held = whole.removeprefix(shown)
        assert shown + held == whole and set(held) <= {"\ufffd"} and len(held) <= 3


def test_a_run_of_bytes_that_becomes_invalid_goes_on():
    """`tokenizers`' own stream raises "Invalid prefix encountered" here."""
    pieces = pieces_of(FALLBACK, ids_of_run([0x0A, 0xC3, "ab"], FALLBACK))
    assert pieces == ["\n", "", "\ufffdab", ""]


@KINDS
def test_half_a_character_comes_out_at_the_end_alone(tokenizer):
    ids = ids_of("ok \U0001f642", tokenizer)[:-1]
    *pieces, tail = pieces_of(tokenizer, ids)
    assert "".join(pieces) == "ok " and "ok " + tail == tokenizer.decode(ids)


def test_after_a_tail_another_stretch_begins():
    stream = TextStream(TokenTexts(FALLBACK))
    ids = ids_of_run(["\u2581ab", 0xC3], FALLBACK)
    for _ in range(2):
        assert "".join(map(stream.push, ids)) + stream.tail() == "ab\ufffd"


@given(
    st.text("ab#\n", max_size=30), st.lists(st.text("ab#\n", min_size=1, max_size=4), max_size=3)
)
def test_text_ends_before_the_first_stop_string_to_complete(text, stops):
    shown = "".join(pieces_of(LEVEL, ids_of(text), stops))
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if ends:
        seen = text[: min(ends)]
        assert shown == seen[: min(seen.find(s) for s in stops if s in seen)]
    else:
        assert shown == text


@KINDS
@given(RUNS, st.lists(st.sampled_from(["\n", "A\n", "\ufffd\ufffd", "\u00e9", " "]), max_size=3))
def test_stop_strings_cut_runs_of_bytes_as_they_cut_their_text(tokenizer, run, stops):
    ids = ids_of_run(run, tokenizer)
    whole, shown = ("".join(pieces_of(tokenizer, ids, stop)) for stop in ((), stops))
    assert whole.startswith(shown) and not any(stop in shown for stop in stops)
    assert shown == whole or any(whole.startswith(shown + stop) for stop in stops)


@KINDS
def test_token_texts_show_bytes_of_split_characters(tokenizer):
    texts = TokenTexts(tokenizer)
    ids = ids_of_run([0x20, 0xC3, 0xA9], tokenizer)
    assert [texts(token) for token in ids] == [" ", "<0xC3>", "<0xA9>"]
    assert texts(FALLBACK.convert_tokens_to_ids("\u2581ab")) == " ab" or tokenizer is LEVEL
