"""The tokenizer of a checkpoint: read, given a known chat template, and what ends its turns."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from medusa_chat.errors import ModelError, first_line
from medusa_chat.hub.catalog import KnownTemplate

TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")


def read_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a folder. Raises ModelError."""
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder} holds no tokenizer: it is incomplete, fetch it again")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises all kinds for broken tokenizer files
        raise ModelError(f"the tokenizer in {folder} is broken: {first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer in {folder} has no fast version: add a tokenizer.json")
    tokenizer.model_max_length = int(1e30)  # the engine knows the context, and refuses in one line
    return tokenizer


def add_known_template(tokenizer: Any, known: KnownTemplate | None) -> list[str]:
    """Give a tokenizer without a chat template ours; a sentence that says so."""
    if tokenizer.chat_template or known is None:
        return []
    tokenizer.chat_template = known.text
    return [f"the checkpoint has no chat template: using the known one for {known.repo}"]


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a turn: the generation config's, and the tokenizer's where its chat
    template uses it."""
    ids = model.generation_config.eos_token_id
    found = set(ids) if isinstance(ids, (list, tuple)) else {ids}
    found.add(tokenizer.eos_token_id)
    for text in TURN_ENDS:
        if tokenizer.chat_template and text in str(tokenizer.chat_template):
            found.add(tokenizer.get_vocab().get(text))
    vocabulary = int(model.config.get_text_config().vocab_size)
    return frozenset(i for i in found if isinstance(i, int) and 0 <= i < vocabulary)
