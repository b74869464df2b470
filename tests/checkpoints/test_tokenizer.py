"""Reading the tokenizer of a checkpoint."""

import io
import json

import pytest
import sentencepiece
from support.checkpoints import write_checkpoint
from support.families import tiny
from support.tokenizer_trials import trials_here  # noqa: F401
from support.tokenizers import byte_fallback_tokenizer, byte_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.tokenizer import _are_below, left_out, read_tokenizer
from medusa_chat.cli.main import main
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

ROWS = ["the cat sat on the mat", "a dog and a cat"] * 50


def test_a_tokenizer_that_is_a_sentencepiece_file_alone_is_read(tmp_path):
    """So the repos of Vicuna v1.3 have it: tokenizer.model, and no tokenizer.json."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ROWS),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = names | {"tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = read_tokenizer(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in ("the cat sat", "\u00dcn\u00efcode \u732b"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs.encode(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("auto_map", [{}, {"AutoTokenizer": ["tokenization_own.Own", None]}])
def test_a_tokenizer_json_is_read_where_the_class_is_unknown_and_no_code_is_run(auto_map, tmp_path):
    known = byte_tokenizer()
    known.save_pretrained(tmp_path)
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('the code was run')")
    file = tmp_path / "tokenizer_config.json"
    values = {"tokenizer_class": "Own", "auto_map": auto_map}
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_tokenizer(tmp_path)("the cat")["input_ids"] == known("the cat")["input_ids"]


@pytest.mark.parametrize("own", [None, "{{ 'own' }}"])
def test_the_template_of_a_processor_is_read_where_the_tokenizer_has_none(tmp_path, own):
    """So the repos of LLaVA 1.5 and Qwen2-VL have it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = own
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'theirs' }}"}))
    assert read_tokenizer(tmp_path).chat_template == (own or "{{ 'theirs' }}")


NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def as_object(text):
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": text, "special": True, **flags}


OBJECTS = {role: as_object(text) for role, text in NAMES.items()}
ADDED = {str(256 + place): as_object(text) for place, text in enumerate(NAMES.values())}
LAYOUTS = {  # tokenizer_config.json, special_tokens_map.json, added_tokens.json
    "texts": (NAMES, {}, {}),
    "objects": (OBJECTS, {}, {}),
    "objects that name their type": (
        {role: {"__type": "AddedToken"} | one for role, one in OBJECTS.items()},
        {},
        {},
    ),
    "a map of texts": ({}, NAMES, {}),
    "a map of objects": (dict.fromkeys(NAMES), OBJECTS, {}),
    "the decoder": (NAMES | {"added_tokens_decoder": ADDED}, OBJECTS, {}),
    "lists": (
        NAMES | {"additional_special_tokens": ["</s>", "<new>"]},
        {"additional_special_tokens": [as_object("<new>")]},
        {},
    ),
    "roles of their own": (
        NAMES | {"image_token": "<s>", "extra_special_tokens": {"boi_token": "</s>"}},
        {"extra_special_tokens": {"boi_token": as_object("<new>")}},
        {},
    ),
    "added tokens": (NAMES | {"pad_token": "<new>"}, {}, {"<new>": 999}),
    "a token that it lacks": (NAMES | {"pad_token": as_object("<new>")}, {}, {}),
}


def write_stored(folder, tokenizer, config, special=None, added=None):
    """A folder with a tokenizer.json and what a repo of Llama has beside it."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, values in (("special_tokens_map", special), ("added_tokens", added)):
        if values:
            (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def prefixed():
    """With a space before each part of a text, BOS before the whole, as Llama 2 has it; it pads
    and cuts off, which is not for prompts."""
    tokenizer = byte_fallback_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 257)])
    return tokenizer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tokenizer_json_decides_every_id_in_any_layout_of_special_tokens(layout, tmp_path):
    """AutoTokenizer makes it anew by its class: "<s> a _ b </s> b", and refuses objects."""
    config, special, added = LAYOUTS[layout]
    theirs = write_stored(tmp_path, prefixed(), config, special, added)
    ours = read_tokenizer(tmp_path, 265)
    for said in ("<s>a b</s>b", " ab  a", "", "<new>a", "\u732b</s>\n<s>"):
        for more in (True, False):
            expected = theirs.encode(said, add_special_tokens=more).ids
            assert ours(said, add_special_tokens=more)["input_ids"] == expected, said
    assert theirs.encode("<s>a b</s>b").tokens[:4] == ["<s>", "<s>", "\u2581a", "\u2581"]
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (257, 258, 256)
    assert max(ours.get_vocab().values()) == 264 and ours.pad_token_id is None
    assert sorted(ours.all_special_ids) == [256, 257, 258]
    is_told = "<new>" in json.dumps(config) + json.dumps(special)
    assert bool(left_out(tmp_path, ours)) == is_told


def test_what_cuts_and_fills_texts_is_not_for_prompts(tmp_path):
    tokenizer = prefixed()
    tokenizer.backend_tokenizer.enable_padding(length=9, pad_id=0, pad_token="[PAD]")
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    write_stored(tmp_path, tokenizer, NAMES)
    ours = read_tokenizer(tmp_path, 265)
    for said in ("ab", "ab ab ab ab"):
        assert ours(said)["input_ids"] == prefixed()(said)["input_ids"]
    assert max(ours.get_vocab().values()) == 264


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("of_file", [True, False])
def test_whether_a_text_begins_with_bos_is_said_by_the_tokenizer_alone(of_file, bos, tmp_path):
    """As in transformers 5: what the settings say of it is for vocabularies to be converted."""
    tokenizer = prefixed() if of_file else byte_fallback_tokenizer()
    told = {} if bos is None else {"add_bos_token": bos}
    write_stored(tmp_path, tokenizer, NAMES | told)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)("ab")["input_ids"]
    assert read_tokenizer(tmp_path)("ab")["input_ids"] == theirs
    assert (theirs[0] == 257) == of_file


def test_templates_lie_in_the_settings_or_in_files(tmp_path):
    listed = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    write_stored(tmp_path, prefixed(), NAMES | {"chat_template": listed})
    assert read_tokenizer(tmp_path).get_chat_template() == "a"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert read_tokenizer(tmp_path).chat_template == "c"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("d")
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    assert read_tokenizer(tmp_path).chat_template == expected == {"default": "c", "rag": "d"}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([{"name": "chat", "template": "a"}], "a"),
        ([{"name": "chat", "template": "a"}, {"name": "rag", "template": "b"}], None),
        ([{"name": 3, "template": "a"}, "a", {}, None], None),
        ({"default": "a"}, None),
        (7, None),
    ],
)
def test_a_template_that_is_none_is_none(told, expected, tmp_path):
    write_stored(tmp_path, prefixed(), NAMES | {"chat_template": told})
    assert read_tokenizer(tmp_path).chat_template == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bos_token", "<new>"),
        ("eos_token", as_object("<new>")),
        ("chat_template", "{{ '<new>' }}"),
        ("chat_template", [{"name": "default", "template": "{{ '<new>' }}"}]),
    ],
)
def test_an_id_beyond_the_embeddings_is_refused_where_it_is_used(name, value, tmp_path, capsys):
    """By the load and by inspect, in one line."""
    folder = write_checkpoint(tmp_path / "model", heads=0, template=None)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    write_stored(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", name: value})
    write_config(folder)
    said = "'<new>' the id 256, and the model has embeddings for 256 tokens"
    with pytest.raises(ModelError, match=said):
        read_tokenizer(folder, 256)
    for command in (["generate", "--prompt", "a", "--checkpoint"], ["inspect"]):
        assert main([*command, str(folder)]) == 4
        assert said in "".join(capsys.readouterr()).replace("\n", " ")


@pytest.mark.parametrize("kind", ["TemplateProcessing", "RobertaProcessing"])
def test_an_id_beyond_the_embeddings_around_every_text_is_refused(kind, tmp_path, capsys):
    """No vocabulary need have it: the part that puts it there has an id of its own."""
    folder = write_checkpoint(tmp_path / "model", heads=0)
    values = json.loads((folder / "tokenizer.json").read_text())
    parts = {
        "TemplateProcessing": {
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {"a": {"id": "a", "ids": [300], "tokens": ["a"]}},
        },
        "RobertaProcessing": {
            "sep": ["b", 97],
            "cls": ["a", 300],
            "trim_offsets": True,
            "add_prefix_space": False,
        },
    }
    values["post_processor"] = {"type": kind, **parts[kind]}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="a token around every text the id 300, and the model"):
        read_tokenizer(folder, 256)
    assert main(["inspect", str(folder)]) == 4
    assert "the id 300" in capsys.readouterr().out


def test_one_that_nothing_uses_is_text(tmp_path):
    """Gemma 3's of 1B has the tokenizer of the larger ones, and no embedding for their pictures."""
    folder = write_checkpoint(tmp_path / "model", heads=0)
    plain = byte_tokenizer()("<new>")["input_ids"]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "image_token": "<new>"}
    write_stored(folder, tokenizer, names)
    write_config(folder)
    *_, (phase, loaded) = load(LoadRequest(str(folder), precision="fp32"))
    assert loaded.tokenizer("<new>")["input_ids"] == plain
    assert any("no id for '<new>'" in note for note in phase.model.notes)


def test_a_vocabulary_larger_than_the_embeddings_is_refused(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "model", heads=0)
    byte_fallback_tokenizer().save_pretrained(folder)
    assert main(["inspect", str(folder)]) == 4
    assert "the id 264, and the model has embeddings for 256" in capsys.readouterr().out
    with pytest.raises(ModelError, match="the id 264"):
        read_tokenizer(folder, 256)


def write_config(folder):
    """The config that `write_stored` has put another in place of."""
    tiny("llama", vocab_size=256, max_position_embeddings=256).config.save_pretrained(folder)


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 2, 9], [0, 0, 1], [5, 6, 7]])
def test_ids_are_looked_at_whether_or_not_some_are_left_out_or_shared(ids):
    words = dict(zip("abc", ids, strict=True))
    backend = Tokenizer(BPE(words, []))
    backend.add_special_tokens(["<x>"])
    largest = max(backend.get_vocab().values())
    for rows in range(1, largest + 3):
        assert _are_below(backend, rows) == (largest < rows)
