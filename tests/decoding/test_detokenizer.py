"""Text made of token ids: whole characters and stop strings."""

from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import byte_tokenizer

from medusa_chat.decoding.detokenizer import TextStream, TokenTexts

TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@given(st.text(max_size=40).filter(lambda text: not text.endswith("\ufffd")))
def test_pieces_join_to_the_text_and_are_whole_characters(text):
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in ids_of(text)]
    assert "".join(pieces) + stream.tail() == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_half_a_character_is_never_printed():
    stream = TextStream(TOKENIZER)
    assert "".join(stream.push(token) for token in ids_of("ok 🙂")[:-1]) + stream.tail() == "ok "


@given(
    st.text("ab#\n", max_size=30), st.lists(st.text("ab#\n", min_size=1, max_size=4), max_size=3)
)
def test_text_ends_before_the_first_stop_string_to_complete(text, stops):
    stream = TextStream(TOKENIZER, stops)
    shown = ""
    for token in ids_of(text):
        shown += stream.push(token)
        if stream.is_stopped:
            break
    shown += stream.tail()
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if ends:
        seen = text[: min(ends)]
        assert shown == seen[: min(seen.find(s) for s in stops if s in seen)]
    else:
        assert shown == text


def test_token_texts_show_bytes_of_split_characters():
    texts = TokenTexts(TOKENIZER)
    assert [texts(token) for token in ids_of("a é")] == ["a", " ", "<0xC3>", "<0xA9>"]
