"""Reading the tokenizer of a checkpoint."""

import io
import json

import pytest
import sentencepiece
from support.tokenizers import byte_tokenizer

from medusa_chat.checkpoints.tokenizer import read_tokenizer

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
