"""The tokenizer of a GGUF file, as transformers reads it, and how text is split for it."""

from pathlib import Path

from tokenizers import Regex, decoders
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast

from medusa_chat.checkpoints.layouts.text_splits import SPLITS, UNSPLIT, WHOLE
from medusa_chat.errors import ModelError, first_line

PREFIX = "add_prefix_space"  # of a sentencepiece vocabulary; transformers 5.23 always adds one


def write_tokenizer(folder: Path, file: Path) -> None:
    """Save them into a folder. What lies beside the file is not read, which `from_pretrained` would
    do. Raises ModelError for a tokenizer that transformers cannot build."""
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    except ImportError as error:
        raise ModelError(
            "GGUF files need transformers 5.23: pip install -U transformers"
        ) from error
    try:
        family, vocabulary, options = get_gguf_tokenizer(str(file))
        name = vocabulary.get("pre_tokenizer_type")
        if name in UNSPLIT:
            vocabulary["tokenizer_type"] = "gemma4"
        backend, more = convert_gguf_tokenizer(family, vocabulary)
        if vocabulary.get("tokenizer_type") == "gpt2" and name in SPLITS:
            backend.pre_tokenizer = _split(SPLITS[name])
            backend.model.ignore_merges = name in WHOLE
        if isinstance(backend.pre_tokenizer, Metaspace) and vocabulary.get(PREFIX) is False:
            backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
            backend.decoder = decoders.Sequence(
                [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options, **more)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise all kinds for odd vocabularies
        raise ModelError(f"the tokenizer in {file} cannot be read: {first_line(error)}") from error


def _split(rules: tuple[str, ...]) -> PreTokenizer:
    """By each expression in turn, then to the alphabet of bytes."""
    cuts = [Split(Regex(rule), behavior="isolated") for rule in rules]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
