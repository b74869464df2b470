"""DFlashFile: a drafter of the DFlash family, recognised by the names of its tensors.

DFlash (z-lab), JetSpec, DeepSpec's and DSpark, in their own layouts, in that of speculators, and in
files of llama.cpp (architecture "dflash"). Other relatives are refused by name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_chat.checkpoints.layouts.drafter_file import (
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

PROJECTIONS = r"self_attn\.[qkvo]_proj\.(weight|bias)|self_attn\.[qk]_norm\.weight"
KNOWN = re.compile(
    r"^(fc\.weight|hidden_norm\.weight|norm\.weight|lm_head\.weight|embed_tokens\.weight|d2t"
    r"|markov_head\.markov_w[12]\.weight|layers\.\d+\.(input_layernorm\.weight"
    rf"|post_attention_layernorm\.weight|mlp\.(gate|up|down)_proj\.(weight|bias)|{PROJECTIONS}))$"
)
UNREAD = re.compile(r"^(t2d$|verifier_|confidence_head\.|.*rotary_emb\.inv_freq$)")
GGUF = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "enc.output_norm": "hidden_norm",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}
ARCHITECTURE = "dflash"
# tensors of relatives that are not read -> what these are
UNKNOWN_PARTS = (
    (re.compile(r"candidate_selector|selector_|conv"), "a DFlash 2 drafter"),
    (re.compile(r"attention_sink|attn_sinks"), "a DFlash drafter with attention sinks"),
    (re.compile(r"^markov_head\.(gate|joint)_proj"), "a DSpark drafter with a gated head"),
    (re.compile(r"prefix_gru|domino"), "a Domino drafter"),
)
OWN_MASK = "mask_embedding.pt"


@dataclass(frozen=True)
class DFlashFile(DrafterFile):
    """A drafter of the DFlash family."""

    @property
    def label(self) -> str:
        """See DrafterFile."""
        if "markov_head.markov_w1.weight" in self.names:
            return "DSpark"
        return "JetSpec" if self.said("causal_head") else "DFlash"

    @property
    def shape_words(self) -> str:
        """See DrafterFile."""
        width, read = self.shapes["fc.weight"]
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''} of width {width}"
        return (
            f"{layers}, {self.block - (not self.reads_root)} tokens in one pass, reads "
            f"{read // width} layers of its backbone"
        )

    @property
    def needs(self) -> str:
        """See DrafterFile."""
        taps = self._named_taps()
        layers = f", and which has more than {max(taps)} layers" if taps else ""
        return f"whose states have {self.shapes['fc.weight'][0]} numbers{layers}"

    def refuse_other(self, backbone: Sizes) -> None:
        """See DrafterFile."""
        width = self.shapes["fc.weight"][0]
        if width != backbone.hidden:
            raise ModelError(
                f"{self.path} reads states of {width} numbers, and the backbone's have "
                f"{backbone.hidden}: give the backbone that it was trained on"
            )
        self.refuse_tokens(backbone)
        refuse_taps(self.path, self.taps(backbone.layers), self.tap_count, backbone.layers)
        own = self.shapes.get("embed_tokens.weight")
        if own is not None and self.mask >= own[0]:
            raise ModelError(
                f"{self.path} masks by token {self.mask}, and its own table has {own[0]:,} "
                "tokens: download it again"
            )
        if own is None and self.mask >= backbone.vocabulary:
            raise ModelError(
                f"{self.path} masks by token {self.mask}, and the backbone has "
                f"{backbone.vocabulary:,} tokens: give the backbone that it was trained on"
            )

    @property
    def tap_count(self) -> int:
        """How many states of the backbone it reads for each token."""
        width, read = self.shapes["fc.weight"]
        return read // width

    def taps(self, layers: int) -> tuple[int, ...]:
        """The places in transformers' `hidden_states`, for a backbone of so many layers."""
        count = self.tap_count
        if named := self._named_taps():
            return named
        if count == 1:
            return (layers // 2 + 1,)
        return tuple(round(1 + at * (layers - 4) / (count - 1)) + 1 for at in range(count))

    def _named_taps(self) -> tuple[int, ...]:
        """As the config has them: one more where z-lab, JetSpec and DeepSpec name layers by their
        outputs; as they stand in files of speculators and of llama.cpp. Empty for none."""
        if self.said("target_layer_ids"):
            return tuple(tap + 1 for tap in numbers_of(self.said("target_layer_ids")))
        stands = self.said("aux_hidden_state_layer_ids")
        return numbers_of(stands) if stands else ()

    @property
    def block(self) -> int:
        """Rows of a pass."""
        return self._number("block_size")

    @property
    def mask(self) -> int:
        """The token of the rows that are to be filled."""
        return self._number("mask_token_id")

    @property
    def reads_root(self) -> bool:
        """Whether each row predicts the token after it."""
        said = self.said("sample_from_anchor")
        if said is not None:
            return bool(said)
        named = " ".join(map(str, self.config.get("architectures") or ()))
        is_spark = self.label == "DSpark" or "DSpark" in named
        return is_spark or self.config.get("speculators_model_type") == "dspark"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer how many tokens back it reads; None for all."""
        kinds = self.config.get("layer_types")
        if self.said("use_swa") and not kinds:
            kinds = ["sliding_attention"] * self.layers
        if not isinstance(kinds, list) or "sliding_attention" not in kinds:
            return (None,) * self.layers
        window = self.said("sliding_window") or self.said("swa_window_size")
        if type(window) is not int or window < 1 or len(kinds) < self.layers:
            raise ModelError(
                f"{self.path}: the config has sliding layers and the window {window!r}: "
                "download it again"
            )
        pairs = kinds[: self.layers]
        return tuple(window if kind == "sliding_attention" else None for kind in pairs)

    @property
    def is_causal(self) -> tuple[bool, ...]:
        """Of each layer whether a row of the block sees only those before it. Where nothing is
        said, sliding layers are taken for causal, as vLLM does."""
        said = [self.said(key) for key in ("is_causal", "causal", "causal_head")]
        given = next((value for value in said if value is not None), None)
        if given is not None:
            return (bool(given),) * self.layers
        return tuple(window is not None for window in self.windows)

    def said(self, key: str) -> Any:
        """What the config says of its form, nested or at the top; None for nothing."""
        nested = self.config.get("dflash_config")
        inner = nested.get(key) if isinstance(nested, Mapping) else None
        return self.config.get(key) if inner is None else inner

    def _number(self, key: str) -> int:
        value, least = self.said(key), 2 if key == "block_size" else 0
        if type(value) is not int or not least <= value < 1 << 24:
            raise ModelError(
                f"{self.path}: its config has {key} {str(value)[:40]}, where a number was "
                "expected: download it again"
            )
        return value


def is_dflash(names: Iterable[str]) -> bool:
    """Whether a file with these tensors holds a drafter of this family."""
    own = {name.removeprefix("model.") for name in names}
    return {"fc.weight", "hidden_norm.weight"} <= own and any(
        n.startswith("layers.0.") for n in own
    )


def dflash_of(found: Found) -> DFlashFile | None:
    """The drafter of this family in these files, None where they hold none. Raises ModelError for
    one that is not known."""
    if found.header is not None:
        if found.architecture != ARCHITECTURE:
            return None
        names = found.named(lambda name: of_gguf(name, GGUF))
        names.pop("rope_freqs.weight", None)
        return _made(found, names, _gguf_config(found))
    names = found.named(lambda name: name.removeprefix("model."))
    return _made(found, names, found.config) if is_dflash(names) else None


def _gguf_config(found: Found) -> dict[str, Any]:
    assert found.header is not None
    sliding = found.read("attention.sliding_window_pattern")
    own = {
        "aux_hidden_state_layer_ids": found.read("target_layers"),
        "block_size": found.read("block_size"),
        "mask_token_id": found.header.metadata.get("tokenizer.ggml.mask_token_id"),
        "sample_from_anchor": found.read("sample_from_anchor"),
        "is_causal": found.read("attention.causal"),
    }
    if sliding is not None and found.read("attention.sliding_window"):
        if not isinstance(sliding, list | tuple):
            raise ModelError(
                f"{found.paths[0]}: its sliding_window_pattern is {str(sliding)[:40]}, where a "
                "list with an entry for each layer was expected: download it again"
            )
        own["sliding_window"] = found.read("attention.sliding_window")
        own["layer_types"] = ["sliding_attention" if f else "full_attention" for f in sliding]
    return gguf_layers(found) | {key: value for key, value in own.items() if value is not None}


def _made(found: Found, names: Mapping[str, str], config: Mapping[str, Any]) -> DFlashFile:
    where = found.paths[0]
    for name in names:
        for pattern, kind in UNKNOWN_PARTS:
            if pattern.search(name):
                raise ModelError(f"{where} is {kind}, which cannot be used yet: take DFlash")
    if OWN_MASK in found.source.files():
        raise ModelError(
            f"{where} is a DFlash drafter with a mask of its own ({OWN_MASK}), which cannot be "
            "used yet: take another"
        )
    kept = known(found, names, KNOWN, UNREAD, "a DFlash drafter")
    shapes = {name: found.shapes[inside] for name, inside in kept.items()}
    for name in ("fc.weight", "hidden_norm.weight", "norm.weight"):
        if name not in shapes:
            raise ModelError(f"{where} lacks {name}: download it again")
    refuse_shapes(where, shapes, {"fc.weight": (None, None)})
    width, read = shapes["fc.weight"]
    if read % width:
        raise ModelError(
            f"{where}: fc.weight is {(width, read)}, which reads no whole number of states: "
            "download it again"
        )
    norms = {name: (width,) for name in ("hidden_norm.weight", "norm.weight")}
    tables = {name: (None, width) for name in ("lm_head.weight", "embed_tokens.weight")}
    refuse_shapes(where, shapes, {**norms, **tables})
    _refuse_markov(where, shapes)
    return DFlashFile(found.paths, kept, shapes, config, found.bytes, found.header is not None)


def _refuse_markov(where: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError for a term for neighbours that is not whole."""
    before, after = (f"markov_head.markov_w{place}.weight" for place in (1, 2))
    if before not in shapes and after not in shapes:
        return
    for name in (before, after):
        if name not in shapes:
            raise ModelError(f"{where} lacks {name}: download it again")
    refuse_shapes(where, shapes, {before: (None, None)})
    drafted = shapes.get("lm_head.weight", (None,))[0]
    refuse_shapes(where, shapes, {after: (drafted, shapes[before][1])})
