"""Vocabularies of GGUF files are read by the rules of llama.cpp, and give no id of their own."""

from types import SimpleNamespace

import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_models import ROWS, tiny_model, write_gguf
from support.loading import answer
from tokenizers import Tokenizer
from transformers import tokenization_utils_tokenizers
from transformers.tokenization_utils_base import generate_merges

from medusa_chat.checkpoints import tokenizer as tokenizers_of_folders
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.gguf_tokenizer import _ranked_merges, write_tokenizer
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.tokenizer import read_tokenizer
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.prompt import encode

CONTROL, USER_DEFINED = 3, 4
BEGIN, END, USER = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\uff5c>",
    "<\uff5cUser\uff5c>",
)
DEEPSEEK = {257: (BEGIN, CONTROL), 258: (END, CONTROL), 259: (USER, USER_DEFINED)}
ADDS = "tokenizer.ggml.add_bos_token"
CHAT = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
SYSTEM_FIRST = "{{ bos_token }}{% if messages[0].role == 'system' %}!{% endif %}" + CHAT


def file_of(folder, **options):
    return write_gguf(folder / "a.gguf", tiny_model(), **options)


def tokenizer_of(path):
    folder = with_settings(Checkpoint.find(LoadRequest(str(path)))).settings
    return read_tokenizer(folder, ROWS)


def test_full_width_control_tokens_keep_their_ids(tmp_path):
    """So DeepSeek V3, R1 and the Qwens made of it have them."""
    template = (
        f"{{{{ bos_token }}}}{{% for m in messages %}}{USER}{{{{ m.content }}}}{END}{{% endfor %}}"
    )
    path = file_of(tmp_path, tokens=DEEPSEEK, template=template)
    *_, (_, loaded) = load(LoadRequest(str(path), precision="fp32"))
    tokenizer = loaded.tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 258)
    assert sorted(tokenizer.get_vocab().values()) == list(range(ROWS))
    ids, text, *_ = encode(loaded, [{"role": "user", "content": "he"}])
    assert ids == [257, 259, 256, 258] and text == f"{BEGIN}{USER}he{END}"
    assert loaded.engine.eos == {258}
    assert answer(loaded, f"{USER}<|endoftext|>", drafter="none")[-1].reason == "length"


@pytest.mark.parametrize(("name", "keeps"), [("Phi-3 mini", ""), ("Llama 2", "\n ")])
def test_space_behind_the_special_tokens_of_phi3_is_none(name, keeps, tmp_path):
    told = {"general__name": name, "tokens": {255: ("<|user|>", CONTROL)}}
    tokenizer = tokenizer_of(file_of(tmp_path, sentencepiece=True, **told))
    behind = tokenizer("<|user|>\n he", add_special_tokens=False)["input_ids"][1:]
    assert tokenizer.decode(behind).lstrip(" ") == f"{keeps}he".lstrip(" ")


@pytest.mark.parametrize("sentencepiece", [False, True])
@pytest.mark.parametrize("name", ["<|tool call|>", "\u25c1think\u25b7", "  ", "<x>"])
def test_a_user_defined_token_is_one_id_and_shown(name, sentencepiece, tmp_path):
    tokens = {200: (name, USER_DEFINED)}
    tokenizer = tokenizer_of(file_of(tmp_path, tokens=tokens, sentencepiece=sentencepiece))
    ids = tokenizer(f"he{name}he", add_special_tokens=False)["input_ids"]
    assert ids.count(200) == 1 and len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == (
        f"he{name}he".replace(" ", "")
    )


@pytest.mark.parametrize("told", [None, True, False])
@pytest.mark.parametrize("template", [CHAT, SYSTEM_FIRST], ids=["without", "with"])
@pytest.mark.parametrize(
    ("split", "usual"), [("sentencepiece", True), ("gpt-2", False), ("llama-bpe", True)]
)
def test_a_prompt_begins_with_one_bos_or_none(split, usual, template, told, tmp_path):
    """What begins with BOS where the file does not say is llama.cpp's rule."""
    more = {"tokenizer__ggml__pre": split} if split != "sentencepiece" else {}
    more["sentencepiece"] = not more
    more |= {"without": (ADDS,)} if told is None else {ADDS: told}
    tokenizer = tokenizer_of(file_of(tmp_path, template=template, **more))
    begins = usual if told is None else told
    info = SimpleNamespace(name="a", context=4096)
    loaded = LoadedModel(None, tokenizer, TokenTexts(tokenizer), None, info, (1, ""))
    bos, text = tokenizer.bos_token_id, tokenizer.bos_token
    user, system = ({"role": role, "content": "he"} for role in ("user", "system"))
    for chat in ([user], [system, user]):
        ids, whole, *_ = encode(loaded, chat)
        assert ids.count(bos) == (begins or template == SYSTEM_FIRST) == whole.count(text)
        assert bos not in ids[1:]
    assert encode(loaded, "he")[0].count(bos) == begins
    assert encode(loaded, f"{text}he")[0].count(bos) == 1
    assert encode(loaded, f"he{text}{text}")[0][-2:] == [bos, bos]


LETTERS = st.text("helo \n\u00e9\u2581", max_size=12)
PARTS = st.lists(st.one_of(LETTERS, st.sampled_from(["<s>", "</s>", "<unk>"])), max_size=5)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    path = file_of(tmp_path_factory.mktemp("sentencepiece"), sentencepiece=True)
    return tokenizer_of(path), GGUFReader(path)


@given(parts=PARTS)
def test_sentencepiece_reads_a_text_as_llama_cpp_does(parts, sentencepiece):
    """Special tokens first, a space before each text between them, then the pair that makes the
    token of the highest score, bytes for the rest."""
    tokenizer, reader = sentencepiece
    words, scores = (
        list(reader.get_field(f"tokenizer.ggml.{name}").contents()) for name in ("tokens", "scores")
    )
    ids = {word: number for number, word in enumerate(words)}
    expected, held = [], ""
    for part in [*parts, None]:
        if part in ("<s>", "</s>", "<unk>", None):
            expected += merged(f" {held}".replace(" ", "\u2581"), ids, scores) if held else []
            held, expected = "", [*expected, ids[part]] if part else expected
        else:
            held += part
    assert tokenizer("".join(parts), add_special_tokens=False)["input_ids"] == expected


def merged(text, ids, scores):
    pieces = list(text)
    while True:
        pairs = [
            (scores[ids[a + b]], -place)
            for place, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if a + b in ids
        ]
        if not pairs:
            break
        place = -max(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    found = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{b:02X}>"] for b in piece.encode()]
    return found


WORDS = st.lists(st.text("abc", min_size=1, max_size=5), unique=True, max_size=30)


@given(words=WORDS, data=st.data())
def test_merges_of_ranked_tokens_are_those_of_transformers(words, data):
    """Also where several tokens have one score."""
    scores = st.lists(st.integers(-3, 3).map(float), min_size=len(words), max_size=len(words))
    ranks = dict(zip(words, data.draw(scores), strict=True))
    special = set(data.draw(st.lists(st.sampled_from(words), max_size=3))) if words else set()
    ids = {word: number for number, word in enumerate(words)}
    expected = generate_merges(ids, ranks, skip_tokens=special)
    assert _ranked_merges(ids.keys() - special, ranks) == expected


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_a_tokenizer_is_parsed_once(sentencepiece, tmp_path, monkeypatch):
    """One of 150,000 tokens takes half a second."""
    calls = []

    class Counted:
        from_file = staticmethod(lambda file: calls.append(file) or Tokenizer.from_file(file))
        from_str = staticmethod(lambda text: calls.append(text) or Tokenizer.from_str(text))

    path = file_of(tmp_path, sentencepiece=sentencepiece)
    monkeypatch.setattr(tokenization_utils_tokenizers, "TokenizerFast", Counted)
    monkeypatch.setattr(tokenizers_of_folders, "Tokenizer", Counted)
    (tmp_path / "settings").mkdir()
    write_tokenizer(tmp_path / "settings", path)
    assert calls == []
    read_tokenizer(tmp_path / "settings", ROWS)
    assert calls == [str(tmp_path / "settings" / "tokenizer.json")]
