"""EagleFile: an EAGLE drafter, recognised by the names of its tensors.

Each tool has its own names. They are mapped to those of speculators: `fc`, `layers.{i}.`, `norm`,
`lm_head`, `embed_tokens`, `d2t`, and in EAGLE-3 `layers.0.hidden_norm`, in 3.1 `fc_norm.{j}` or
`input_norm`. Files of llama.cpp (architecture "eagle3") are read as well.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from medusa_chat.checkpoints.layouts.drafter_file import (
    GGUF_LAYER,
    DrafterFile,
    Found,
    Sizes,
    gguf_layers,
    known,
    numbers_of,
    of_gguf,
    refuse_shapes,
    refuse_taps,
)
from medusa_chat.errors import ModelError

RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^pre_lm_head_layernorm\."), "norm."),
)
PROJECTIONS = r"self_attn\.[qkvo]_proj\.(weight|bias)|self_attn\.[qk]_norm\.weight"
KNOWN = re.compile(
    r"^(fc\.(weight|bias)|norm\.weight|lm_head\.weight|embed_tokens\.weight|d2t|input_norm\.weight"
    r"|fc_norm\.\d+\.weight|layers\.\d+\.(hidden_norm\.weight|input_layernorm\.weight"
    rf"|post_attention_layernorm\.weight|mlp\.(gate|up|down)_proj\.(weight|bias)|{PROJECTIONS}))$"
)
UNREAD = re.compile(r"^(t2d$|verifier_|.*rotary_emb\.inv_freq$)")
GGUF = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
GGUF_INSIDE = GGUF_LAYER | {"attn_norm_2": "hidden_norm"}
ARCHITECTURE = "eagle3"
UNKNOWN_PARTS = {  # tensors of drafters that are not read -> what they are
    "mask_hidden": "P-EAGLE",
    "embedding_layernorm.weight": "HASS",
    "hidden_states_layernorm.weight": "HASS",
}


@dataclass(frozen=True)
class EagleFile(DrafterFile):
    """An EAGLE drafter. In llama.cpp's files the rows of its heads are in that program's order."""

    @property
    def reads_taps(self) -> bool:
        """Whether it is EAGLE-3 or 3.1."""
        return "layers.0.hidden_norm.weight" in self.names

    @property
    def label(self) -> str:
        """Its name in words."""
        if not self.reads_taps:
            return "EAGLE-1"
        is_newer = self.config.get("norm_output") or "fc_norm.0.weight" in self.names
        return "EAGLE-3.1" if is_newer else "EAGLE-3"

    @property
    def shape_words(self) -> str:
        """See DrafterFile."""
        width, read = self.shapes["fc.weight"]
        rows = self.shapes.get("lm_head.weight", (0,))[0]
        tokens = f", drafts {rows:,} tokens" if rows else ""
        reads = f"reads {read} numbers a token" if self.reads_taps else "reads the last state"
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''} of width {width}"
        return f"{layers}, {reads} of its backbone{tokens}"

    @property
    def needs(self) -> str:
        """See DrafterFile."""
        width, read = self.shapes["fc.weight"]
        if not self.reads_taps:
            return f"whose states have {read - width} numbers"
        if taps := self.taps(0, 0):
            each = read // len(taps)
            return f"whose states have {each} numbers, and which has more than {max(taps)} layers"
        return f"three of whose states have {read} numbers"

    def refuse_other(self, backbone: Sizes) -> None:
        """See DrafterFile."""
        self.refuse_tokens(backbone)
        count = self.tap_count(backbone.hidden)
        refuse_taps(self.path, self.taps(count, backbone.layers), count, backbone.layers)

    def tap_count(self, hidden: int) -> int:
        """How many states of the backbone it reads, each of `hidden` numbers. Raises ModelError."""
        own, width = self.shapes["fc.weight"]
        fits = width % hidden == 0 if self.reads_taps else width == own + hidden
        if not fits:
            raise ModelError(
                f"{self.path} reads states of {width} numbers, and the backbone's have {hidden}: "
                "give the backbone that it was trained on"
            )
        return width // hidden if self.reads_taps else 0

    def said(self, key: str) -> Any:
        """What the config says of its form, at the top or nested; None for nothing."""
        nested = self.config.get("eagle_config")
        return self.config.get(key, nested.get(key) if isinstance(nested, Mapping) else None)

    def taps(self, count: int, layers: int) -> tuple[int, ...]:
        """The places in transformers' `hidden_states`: as they stand at the top of a config, and
        one more where SGLang's list is nested or DeepSpec names layers by their outputs."""
        key, nested = "eagle_aux_hidden_state_layer_ids", self.config.get("eagle_config")
        if self.config.get(key):
            return numbers_of(self.config[key])
        if isinstance(nested, Mapping) and nested.get(key):
            return tuple(tap + 1 for tap in numbers_of(nested[key]))
        if self.config.get("target_layer_ids"):
            return tuple(tap + 1 for tap in numbers_of(self.config["target_layer_ids"]))
        return (2, layers // 2, layers - 3) if count == 3 else ()


def is_eagle(names: Iterable[str]) -> bool:
    """Whether a file with these tensors holds an EAGLE drafter."""
    own = {_canonical(name) for name in names}
    is_layered = any(name.startswith("layers.0.") for name in own)
    return "fc.weight" in own and is_layered and "hidden_norm.weight" not in own


def eagle_of(found: Found) -> EagleFile | None:
    """The EAGLE drafter in these files, None where they hold none. Raises ModelError for one that
    is not known."""
    if found.header is not None:
        return _in_gguf(found) if found.architecture == ARCHITECTURE else None
    names = found.named(_canonical)
    if not is_eagle(names):
        return None
    return _made(found, names, found.config)


def _canonical(name: str) -> str:
    for pattern, new in RENAMED:
        name = pattern.sub(new, name)
    return name


def _in_gguf(found: Found) -> EagleFile:
    names = found.named(lambda name: of_gguf(name, GGUF, GGUF_INSIDE))
    names.pop("rope_freqs.weight", None)
    config = gguf_layers(found) | {
        "eagle_aux_hidden_state_layer_ids": found.read("target_layers")
        or found.read("extract_layers"),
        "norm_before_residual": found.read("norm_before_residual"),
    }
    return _made(found, names, config)


def _made(found: Found, names: Mapping[str, str], config: Mapping[str, Any]) -> EagleFile:
    for name, kind in UNKNOWN_PARTS.items():
        if name in names:
            raise ModelError(
                f"{found.paths[0]} is a {kind} drafter, which cannot be used yet: take EAGLE-3"
            )
    kept = known(found, names, KNOWN, UNREAD, "an EAGLE drafter")
    shapes = {name: found.shapes[inside] for name, inside in kept.items()}
    refuse_shapes(found.paths[0], shapes, {"fc.weight": (None, None)})
    width = shapes["fc.weight"][0]
    norms = {name: (width,) for name in ("norm.weight", "layers.0.hidden_norm.weight")}
    tables = {name: (None, width) for name in ("lm_head.weight", "embed_tokens.weight")}
    refuse_shapes(found.paths[0], shapes, {**norms, **tables})
    return EagleFile(found.paths, kept, shapes, config, found.bytes, found.header is not None)
