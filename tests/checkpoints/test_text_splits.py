"""Text is split before a tokenizer merges it as its GGUF file names it, or a line says that it is
not known how. The pieces are those of llama.cpp (0.3.36 of llama-cpp-python) where its expressions
are the models' own, elsewhere what these give by hand."""

import json

import pytest
from support import gguf_models
from support.gguf_models import tiny_model, write_gguf
from transformers import AutoTokenizer

from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.layouts.text_splits import BEGUN, RULES, SPLITS, UNSPLIT, WHOLE
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.cli.main import main
from medusa_chat.messages import LoadRequest

EVERY_TOKEN = {"vocab_size_per_layer_input": gguf_models.ROWS}
TEXT = "He'LL pay  $12345.\n\n \tok/ 中文，한국 ("
PIECES = {  # cut at |; names of the same rules once
    "gpt-2": "He|'|LL| pay| | $|12345|.|\n\n |\t|ok|/| 中文|，|한국| (",
    "smollm": "He|'|LL| pay| | $|1|2|3|4|5|.|\n\n |\t|ok|/| 中文|，|한국| (",
    "llama-bpe": "He|'LL| pay| | $|123|45|.\n\n| |\tok|/| 中文|，한국| (",
    "qwen2": "He|'LL| pay| | $|1|2|3|4|5|.\n\n| |\tok|/| 中文|，한국| (",
    "qwen35": "He|'LL| pay| | $|1|2|3|4|5|.\n\n| |\tok|/| 中文|，한국| (",
    "ufakzeka": "He|'LL| pay| | $|1|2|3|4|5|.\n\n| |\tok|/| 中文|，한국| (",
    "laguna": "He|'LL| pay| | $|1|2|3|4|5|.|\n\n| |\tok|/| 中文|，한국| (",
    "minicpm5": "He|'LL| pay| | $|123|45|.\n\n| |\tok|/| 中文|，한국| (",
    "tekken": "He|'LL| pay| | $|1|2|3|4|5|.\n\n| |\tok|/| 中文|，한국| (",
    "gpt-4o": "He'LL| pay| | $|123|45|.\n\n| |\tok|/| 中文|，한국| (",
    "tiny_aya": "He'LL| pay| | $|12|345|.\n\n| |\tok|/| 中文|，한국| (",
    "youtu": "He'LL| pay| | $|1|2|3|4|5|.\n\n| |\tok|/| |中文|，|한국| (",
    "deepseek-v3": "He|'LL| pay| | $|123|45|.\n\n| |\tok|/| |中文|，|한국| (",
    "spark2_5": "He|'LL| pay| | $|1|2|3|4|5|.|\n|\n| |\tok|/| |中文|，|한국| (",
    "afmoe": "He|'LL| pay| | $|12|345|.\n\n| |\tok|/| |中文|，|한국| (",
    "superbpe": "He'LL pay  $|12|345|.\n\n \tok/ 中文，한국 (",
    "kimi-k2": "He'LL| pay| | $|123|45|.\n\n| |\tok|/| |中文|，한국| (",
    "chameleon": "He|'|LL| pay|  |$|1|2|3|4|5|.|\n|\n| |\t|ok|/| 中文|，|한국| |(",
    "deepseek-coder": "He|'|LL| pay|  $|1|2|3|4|5|.|\n|\n| |\tok|/| |中文|，|한국| (",
    "deepseek-llm": "He|'|LL| pay| | $|12345|.|\n|\n| |\tok|/| |中文|，|한국| (",
    "falcon": "He|'|LL| pay|  |$|123|45|.|\n\n |\t|ok|/| 中文|，|한국| |(",
    "bailingmoe": "He|'LL| pay| | $|1|2|3|4|5|.\n\n| |\tok|/| 中文|，한국| (",
    "seed-coder": "He|'LL| pay| | $|1|2|3|4|5|.|\n\n| |\tok|/| 中文|，한국| (",
    "exaone-moe": "He|'LL| pay| | $|1|2|3|4|5|.\n|\n| |\tok|/| 中文|，한국| (",
    "jais-2": "He|'LL| pay| | $|123|45|.\n\n| |\tok|/| 中文|，한국| (",
    "poro-chat": "He'LL| pay| | $12345|.\n\n \t|ok/| 中文|，|한국| (",
    "viking": "He'LL| pay| | $|1|2|3|4|5|.\n\n \t|ok/| 中文|，|한국| (",
}
OTHERS = (  # where two of these rules part
    ("llama-bpe", "a \n \nb.\nc", "a| \n \n|b|.\n|c"),
    ("qwen2", "cafe\u0301s", "cafe|\u0301s"),
    ("qwen35", "cafe\u0301s", "cafe\u0301s"),
    ("ufakzeka", "it's", "it|'s"),
    ("ufakzeka", "a'dan", "a|'dan"),
    ("qwen2", "a'dan", "a|'d|an"),
    ("tekken", "iPhone'SA/\n", "i|Phone|'SA|/\n"),
    ("gpt-4o", "iPhone'SA/\n", "i|Phone'S|A|/\n"),
    ("exaone-moe", "two words 1", "two words| |1"),
    ("jais-2", " " * 13 + "a", f"{' ' * 8}|{' ' * 4}| a"),
    ("kimi-k2", "iPhone's 中a中/\n", "i|Phone's| |中|a|中|/\n"),
    ("afmoe", "1234567 1 ½", "1|234|567| |1| |½"),
    ("superbpe", "123456 12", "123|456| |12"),
    ("deepseek-llm", "Яñ ñAA", "Яñ| ñ|AA"),  # from : to ~ there are letters, too
    ("deepseek-coder", "ab Яb ʻa", "ab| Яb| ʻa"),
)


def tokenizer_of(name, folder):
    path = write_gguf(folder / "a.gguf", tiny_model(), tokenizer__ggml__pre=name)
    found = with_settings(Checkpoint.find(LoadRequest(str(path))))
    return AutoTokenizer.from_pretrained(found.settings)


@pytest.mark.parametrize(
    ("name", "said", "pieces"), [*((name, TEXT, told) for name, told in PIECES.items()), *OTHERS]
)
def test_text_is_split_as_the_file_names_it(name, said, pieces, tmp_path):
    tokenizer = tokenizer_of(name, tmp_path)
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(said)
    assert "|".join(said[slice(*place)] for _, place in found) == pieces
    assert tokenizer.decode(tokenizer(said).input_ids, skip_special_tokens=True) == said
    assert tokenizer.backend_tokenizer.model.ignore_merges == (name in WHOLE)


def test_every_rule_is_tested_and_no_name_stands_twice():
    names = [name for names in RULES for name in names]
    assert len(names) == len(set(names)) and {*WHOLE, *BEGUN} < set(names)
    assert {SPLITS[name] for name in PIECES} == set(RULES.values())


@pytest.mark.parametrize("name", UNSPLIT)
def test_a_vocabulary_of_plain_text_is_not_split(name, tmp_path):
    told = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": name}
    path = write_gguf(tmp_path / "a.gguf", tiny_model("gemma4", **EVERY_TOKEN), **told)
    found = Checkpoint.find(LoadRequest(str(path)))
    tokenizer = AutoTokenizer.from_pretrained(with_settings(found).settings)
    ids = tokenizer(" he\n", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["\u2581he", "<0x0A>"]
    assert tokenizer.decode(ids) == " he\n" and not found.notes


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("brand-new", "splits text by rules called 'brand-new', which are not known here"),
        ("", "does not say how text is split"),
    ],
)
def test_rules_that_are_not_known_are_one_line(name, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gguf_models, "PRE", name)
    path = write_gguf(tmp_path / "a.gguf", tiny_model())
    expected = f"the GGUF file {told}: it is split as GPT-2 does, and answers may be worse"
    assert main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out.count(f"  note      {expected}\n") == 1
    asked = ["--prompt", "a", "--max-new-tokens", "2", "--device", "cpu", "--verbose"]
    for _ in range(2):  # when its settings are written, and later
        assert main(["generate", "--backbone", str(path), *asked]) == 0
        assert capsys.readouterr().err.count(f"{expected}\n") == 1


def test_of_rules_that_are_known_nothing_is_told(tmp_path, capsys):
    write_gguf(tmp_path / "a.gguf", tiny_model(), tokenizer__ggml__pre="smollm")
    write_gguf(tmp_path / "b.gguf", tiny_model(), sentencepiece=True)
    for name in ("a.gguf", "b.gguf"):
        assert main(["inspect", str(tmp_path / name), "--json"]) == 0
        assert not json.loads(capsys.readouterr().out)["notes"]
