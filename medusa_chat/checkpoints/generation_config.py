"""The generation config of a backbone: read, and what of it is not applied."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from medusa_chat.errors import ModelError, first_line

# what changes the text in transformers and not here -> the value that changes nothing
NOT_APPLIED = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "min_length": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
}


def read_generation_config(folder: Path, config: Any) -> Any:
    """The backbone's generation config, else what its own config says of generation. Raises
    ModelError."""
    try:
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
        return GenerationConfig.from_model_config(config)
    except Exception as error:  # transformers raises all kinds for broken files
        raise ModelError(
            f"the generation_config.json in {folder} cannot be read: {first_line(error)}"
        ) from error


def not_applied(found: Any) -> list[str]:
    """A sentence that names what of a generation config is not applied, where there is any."""
    values = {name: getattr(found, name, None) for name in NOT_APPLIED}
    names = [n for n, value in values.items() if value and value != NOT_APPLIED[n]]
    return [f"not applied, of generation_config.json: {', '.join(names)}"] if names else []
