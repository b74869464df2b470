"""The tokenizer and the chat template of a GGUF file, as transformers reads them."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from medusa_chat.errors import ModelError, first_line


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
        backend, more = convert_gguf_tokenizer(family, vocabulary)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options, **more)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise all kinds for odd vocabularies
        raise ModelError(f"the tokenizer in {file} cannot be read: {first_line(error)}") from error
