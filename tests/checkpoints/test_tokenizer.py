"""Reading the tokenizer of a checkpoint."""

import io
import json

import sentencepiece

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
