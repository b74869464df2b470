"""Dry load: a checkpoint read by the load's own readers, without the values of its weights.

So `inspect` and a load cannot disagree about a file: there is one reader of each kind.
"""

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from medusa_chat.checkpoints import gguf_backbone, weights
from medusa_chat.checkpoints.adapters import with_adapter
from medusa_chat.checkpoints.generation_config import read_generation_config
from medusa_chat.checkpoints.head_weights import read_heads
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.tokenizer import read_tokenizer
from medusa_chat.checkpoints.tokenizer_trial import TokenizerTrial
from medusa_chat.checkpoints.turn_ends import end_tokens
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.calibration import Calibration


def dry_load(request: LoadRequest) -> None:
    """Read a checkpoint that lies whole on this disk. Of the backbone no value is read, so that
    numbers which are none, and what its family does otherwise in a tree, are told by a load alone.
    Raises ModelError, as a load would."""
    found = Checkpoint.find(request)
    config = weights.config_of(found)
    if found.calibration:
        Calibration.read(found.calibration)
    read_heads(found, config)
    if not found.weights.stored:
        _read_folder(found, config, found.backbone)
        return
    with tempfile.TemporaryDirectory(prefix="medusa-chat-") as folder:
        gguf_backbone.write_settings(found, Path(folder))
        _read_folder(found, weights.read_config(Path(folder)), Path(folder))


def _read_folder(found: Checkpoint, config: Any, folder: Path) -> None:
    """folder: with the config and the tokenizer of the backbone."""
    with closing(TokenizerTrial(folder, plain_too=True)) as trial:
        trial.refuse()
    tokenizer = read_tokenizer(folder, int(config.get_text_config().vocab_size))
    model = weights.empty_model(found, config)
    model.generation_config = read_generation_config(folder, config)
    end_tokens(model, tokenizer)
    TokenTexts(tokenizer)
    if found.adapter is not None:
        with_adapter(model, found.adapter)
