"""HydraFile: Hydra's heads, recognised by the names of their tensors (zankner/Hydra)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from medusa_chat.checkpoints.layouts.drafter_file import (
    Found,
    PathHeadsFile,
    known,
    refuse_shapes,
)
from medusa_chat.errors import ModelError

RENAMED = (
    (re.compile(r"^prefix_embeding_layer\.(layers\.0\.|norm\.)"), r"\1"),
    (re.compile(r"^hydra_lm_head\.(\d+)\.1\."), r"hydra_lm_head.\1."),
)
LAYER = r"(input_layernorm|post_attention_layernorm|mlp\.\w+_proj|self_attn\.[qkvo]_proj)"
KNOWN = re.compile(
    r"^(hydra_mlp\.\d+\.\d+\.(linear|res_connection)\.(weight|bias)|norm\.weight"
    rf"|hydra_lm_head\.\d+\.(weight|bias)|layers\.0\.{LAYER}\.weight)$"
)
UNREAD = re.compile(r"^(input_embed_fn\.|prefix_embeding_layer\.embed_tokens|.*rotary_emb\.)")
FIRST = re.compile(r"^hydra_mlp\.(\d+)\.(\d+)\.res_connection\.weight$")


@dataclass(frozen=True)
class HydraFile(PathHeadsFile):
    """Heads of Hydra, with a layer before them in Hydra++."""

    @property
    def label(self) -> str:
        """See DrafterFile."""
        return "Hydra++" if "norm.weight" in self.names else "Hydra"

    @property
    def heads(self) -> int:
        """How many."""
        return len({name.split(".")[1] for name in self.names if name.startswith("hydra_lm_head")})

    @property
    def sizes(self) -> tuple[int, int]:
        """See PathHeadsFile."""
        rows, width = self.shapes["hydra_lm_head.0.weight"]
        return width, rows

    @property
    def shape_words(self) -> str:
        """See DrafterFile."""
        before = " behind a decoder layer" if self.label == "Hydra++" else ""
        return f"{self.heads} heads of width {self.sizes[0]}{before}, each reads the path before it"


def is_hydra(names: Iterable[str]) -> bool:
    """Whether a file with these tensors holds Hydra's heads."""
    return any(name.startswith("hydra_mlp.") for name in names)


def hydra_of(found: Found) -> HydraFile | None:
    """Hydra's heads in these files, None where they hold none. Raises ModelError for what is not
    known."""
    if found.header is not None or not is_hydra(found.shapes):
        return None
    config, where = found.config, found.paths[0]
    kept = known(found, found.named(_canonical), KNOWN, UNREAD, "a Hydra drafter")
    shapes = {name: found.shapes[inside] for name, inside in kept.items()}
    made = HydraFile(found.paths, kept, shapes, config, found.bytes)
    if config.get("hidden_state_offset") or not any(map(FIRST.match, kept)):
        raise ModelError(
            f"{where} holds Hydra's heads that read an earlier state or no tokens, which cannot be "
            "used yet: take Hydra or Hydra++"
        )
    if made.heads < 1 or "hydra_lm_head.0.weight" not in shapes:
        raise ModelError(f"{where} lacks hydra_lm_head.0.weight: download it again")
    refuse_shapes(where, shapes, {"hydra_lm_head.0.weight": (None, None)})
    refuse_shapes(where, shapes, {"norm.weight": (made.sizes[0],)})
    return made


def _canonical(name: str) -> str:
    for pattern, new in RENAMED:
        name = pattern.sub(new, name)
    return name
