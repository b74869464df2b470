"""The tokenizer of a checkpoint: read, given a known chat template, and what ends its turns."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from medusa_chat.checkpoints.layouts.source import LocalFolder, read_json
from medusa_chat.errors import ModelError, first_line
from medusa_chat.hub.catalog import KnownTemplate

OF_PROCESSOR = "chat_template.json"  # where vision-language checkpoints may have the template
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")


def read_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a folder. Raises ModelError."""
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder} holds no tokenizer: it is incomplete, fetch it again")
    try:
        try:
            tokenizer = _read(AutoTokenizer, folder)
        except ValueError:  # what transformers raises for code that it may not run, too
            if not _has_own_code(folder):
                raise
            tokenizer = _read(PreTrainedTokenizerFast, folder)
    except Exception as error:  # transformers raises all kinds for broken tokenizer files
        raise ModelError(f"the tokenizer in {folder} is broken: {first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer in {folder} has no fast version: add a tokenizer.json")
    if not tokenizer.chat_template and (folder / OF_PROCESSOR).is_file():
        template = read_json(LocalFolder(folder), OF_PROCESSOR).get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    tokenizer.model_max_length = int(1e30)  # the engine knows the context, and refuses in one line
    return tokenizer


def _read(kind: Any, folder: Path) -> Any:
    return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _has_own_code(folder: Path) -> bool:
    """Whether a tokenizer would be read by code of its folder, which is never run, and has a
    tokenizer.json, which needs none."""
    config = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file() or not config.is_file():
        return False
    named = read_json(LocalFolder(folder), config.name).get("auto_map")
    return isinstance(named, dict) and "AutoTokenizer" in named


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
