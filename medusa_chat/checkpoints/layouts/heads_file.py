"""HeadsFile: what a file of Medusa heads holds, by the names and shapes of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from medusa_chat.checkpoints.layouts.names import ONE_LM_HEAD, TOKEN_MAP

LAYOUTS = {
    "A": "heads alone, each with an LM head of its own",
    "B": "heads alone that share the backbone's LM head (version 2)",
    "C": "a whole model with its heads in the same weights (Medusa-2)",
    "D": "heads whose layers are one layer repeated",
    "E": "heads as vLLM writes them",
    "F": "heads as ModelOpt and TensorRT-LLM write them",
    "G": "heads alone in a file that is named like a whole model",
    "H": "a whole model with its heads in the same weights and a medusa_config",
    "I": "heads with a LoRA adapter for the backbone",
    "J": "heads without layers: LM heads only",
}


@dataclass(frozen=True)
class HeadsFile:
    """The heads of a checkpoint, before any value of theirs is read.

    is_whole: they lie in the weights of their own backbone, which differs from the one it was
    made of. root: the heads read the root, the token that is certain when they draft.
    tensors: canonical name (names.py) -> (file, name in it). lm: "own" one for each,
    "one" for all together, "shared" the backbone's. vocabulary: rows of the own LM heads, else
    None; with is_truncated they are some tokens of a larger vocabulary, named by a token map.
    bytes: on disk. base: the backbone that the config names. disagreements: a sentence for each
    thing that the config says otherwise; the file is right.
    """

    layout: str
    files: tuple[str, ...]
    is_whole: bool
    tensors: Mapping[str, tuple[str, str]]
    heads: int
    layers: int
    bias: bool
    lm: Literal["own", "one", "shared"]
    root: bool
    dtype: str
    hidden: int
    vocabulary: int | None
    is_truncated: bool
    parameters: int
    bytes: int
    base: str | None = None
    disagreements: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The layout in words."""
        return LAYOUTS[self.layout]

    def first(self, heads: int) -> "HeadsFile":
        """Only the first heads, as a tree needs them that is no deeper; all when there are no
        more. parameters and bytes are those of what is left."""
        if heads >= self.heads:
            return self
        kept = {n: place for n, place in self.tensors.items() if head_of(n) < heads}
        share = self.hidden * (self.layers * (self.hidden + self.bias) + self.hidden * self.root)
        share += self.hidden * (self.vocabulary or 0) if self.lm == "own" else 0
        less = share * (self.heads - heads)
        size = self.bytes // self.parameters
        return replace(
            self,
            tensors=kept,
            heads=heads,
            parameters=self.parameters - less,
            bytes=self.bytes - less * size,
        )


def head_of(name: str) -> int:
    """The head that a canonical tensor belongs to; -1 for what all share."""
    return -1 if name in (ONE_LM_HEAD, TOKEN_MAP) else int(name.partition(".")[0])
