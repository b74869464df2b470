"""LoRA: reads what a merge needs from an adapter's config, by an allow-list.

Which modules the adapter changes, and with what rank, follows from its tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from medusa_chat.checkpoints.layouts.source import Source, read_json
from medusa_chat.errors import ModelError

CONFIG = "adapter_config.json"
MAX_ALPHA = 1e6
MAX_PATTERNS = 1000
FLAGS = ("fan_in_fan_out", "use_rslora", "use_dora")
# initialisations that leave the backbone unchanged; the others subtract something from it
STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
# options that a low-rank merge cannot express -> what an adapter with one has
UNMERGED = {
    "modules_to_save": "modules saved whole",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "single rows of embeddings",
    "alora_invocation_tokens": "an activation in the middle of the text",
    "target_parameters": "parameters that are not modules",
    "use_qalora": "grouped inputs",
    "use_bdlora": "blocks of ranks",
    "arrow_config": "a router",
    "kasa_config": "a truncated backbone",
    "monteclora_config": "sampled weights",
    "ensure_weight_tying": "an adapter tied to another",
}
# limits of a pattern of module names, so that it matches quickly: unbounded repetitions, and no
# repeated groups
ENDLESS, MAX_ENDLESS, NESTED = re.compile(r"[*+{]"), 4, re.compile(r"\)\s*[*+{]")


@dataclass(frozen=True)
class LoraSettings:
    """alpha: the scale of the product is alpha over its rank. alphas: pattern of module names ->
    their own alpha, the first match counts. flags: names of FLAGS that are set."""

    alpha: float
    alphas: Mapping[str, float]
    flags: tuple[str, ...]


def lora_settings(source: Source, path: str) -> LoraSettings:
    """The settings of the adapter whose config is at `path`. Raises ModelError for anything but a
    plain LoRA, with what it has."""
    file = f"{source.name}/{path}"
    config = read_json(source, path)
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(f"{file}: its peft_type is {str(kind)[:40]!r}: give a plain LoRA adapter")
    odd = [words for key, words in UNMERGED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        odd.append("biases of the backbone")
    if config.get("init_lora_weights") not in STARTS:
        odd.append(f"a backbone changed by {str(config['init_lora_weights'])[:40]}")
    if odd:
        raise ModelError(
            f"{file} is not supported: it has {' and '.join(odd)}; give a plain LoRA adapter, or "
            "merge it"
        )
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or len(alphas) > MAX_PATTERNS:
        raise ModelError(f"{file} has no valid alpha_pattern: download it again")
    for pattern in alphas:
        _refuse_pattern(pattern, file)
    for key, value in {"lora_alpha": config.get("lora_alpha", 8), **alphas}.items():
        if type(value) not in (int, float) or not 0 <= abs(value) <= MAX_ALPHA:
            raise ModelError(
                f"{file} has no valid {key[:80]} ({str(value)[:40]}): download it again"
            )
    flags = tuple(key for key in FLAGS if config.get(key) is True)
    return LoraSettings(config.get("lora_alpha", 8), alphas, flags)


def _refuse_pattern(pattern: str, file: str) -> None:
    is_quick = len(ENDLESS.findall(pattern)) <= MAX_ENDLESS and not NESTED.search(pattern)
    try:
        re.compile(pattern)
    except (re.error, RecursionError):
        is_quick = False
    if len(pattern) > 500 or not is_quick:
        raise ModelError(
            f"{file} has the pattern {pattern[:80]!r} in its alpha_pattern, which is too complex: "
            "use names of modules, or merge the adapter"
        )
