"""What a config.json says about heads, and where the file says otherwise. The file is right."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from medusa_chat.checkpoints.layouts.heads_file import HeadsFile

REPO = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
# a share of the network, as Windows reads a name: opening one tells its host who the user is
SHARE = re.compile(r"[\\/]([\\/]|\?\?)")
# where each tool writes it; the first that is there counts
HEADS = ("medusa_num_heads", "num_medusa_heads", "num_heads")
LAYERS = ("medusa_num_layers", "num_medusa_layers", "num_hidden_layers")


def base_of(config: Mapping[str, Any]) -> str | None:
    """The backbone that the config names, None for none ("N/A" is none, and a share of the network,
    which only the user may name)."""
    base = config.get("base_model_name_or_path")
    base = base.strip() if isinstance(base, str) else ""
    if base.lower() not in ("", "n/a", "none", "null") and not SHARE.match(base):
        return base[:300]
    copied = config.get("_name_or_path")  # transformers' own, in a config that was copied whole
    return copied if isinstance(copied, str) and REPO.match(copied) else None


def disagreements(config: Mapping[str, Any], heads: HeadsFile) -> Iterator[str]:
    """A sentence for each thing that the config says otherwise than the file."""
    nested = _nested(config)
    is_model = nested is config and (heads.is_whole or config.get("model_type") != "medusa")
    for keys, found, what in ((HEADS, heads.heads, "heads"), (LAYERS, heads.layers, "layers")):
        # a model's own config counts its own heads and layers under the plain names
        key = next((k for k in keys[: 2 if is_model else 3] if k in nested), None)
        if key is not None and nested[key] != found:
            yield f"config.json says {str(nested[key])[:20]} {what}, the file has {found}"
    version = str(config.get("version", ""))
    if version == "2" and heads.lm != "shared":
        yield "config.json says version 2 (no LM heads), the file has LM heads of its own"
    if version == "1" and heads.lm == "shared":
        yield "config.json says version 1 (own LM heads), the file has none"
    if isinstance(config.get("hidden_size"), int) and config["hidden_size"] != heads.hidden:
        yield f"config.json says hidden size {config['hidden_size']}, the file has {heads.hidden}"
    if config.get("medusa_fc_bias") is False and heads.bias:
        yield "config.json says no bias, the file has one"


def has_medusa_config(config: Mapping[str, Any]) -> bool:
    """Whether a model's config keeps what it says about heads in `medusa_config`."""
    return isinstance(config.get("medusa_config"), dict)


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("medusa_config", "medusa"):
        if isinstance(config.get(key), dict):
            return config[key]
    return config
