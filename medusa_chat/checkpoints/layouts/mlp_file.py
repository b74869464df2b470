"""MlpFile: IBM's MLP speculator, recognised by the names of its tensors."""

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

PREFIX = "speculator."
KNOWN = re.compile(r"^((emb|proj|head)\.\d+\.weight|ln\.\d+\.(weight|bias))$")
UNREAD = re.compile(r"^$")


@dataclass(frozen=True)
class MlpFile(PathHeadsFile):
    """An MLP speculator. Heads that are tied may be in the file once."""

    @property
    def label(self) -> str:
        """See DrafterFile."""
        return "MLP speculator"

    @property
    def heads(self) -> int:
        """How many."""
        count = self.config.get("n_predict")
        if type(count) is not int or not 1 <= count <= 64:
            raise ModelError(
                f"{self.path}: its config has n_predict {str(count)[:40]}, where a number was "
                "expected: download it again"
            )
        return count

    @property
    def is_tied(self) -> bool:
        """Whether all heads share their weights."""
        return bool(self.config.get("tie_weights"))

    def stored(self, part: str, head: int) -> str:
        """The tensor of a head's part, such as "emb" or "ln" and "bias", in the file."""
        name, _, end = part.partition(" ")
        own = f"{name}.{head}.{end or 'weight'}"
        if own in self.names or not self.is_tied:
            return own
        return f"{name}.{min(head, 1) if name == 'proj' else 0}.{end or 'weight'}"

    @property
    def sizes(self) -> tuple[int, int]:
        """See PathHeadsFile."""
        return self.shapes["proj.0.weight"][1], self.shapes["head.0.weight"][0]

    @property
    def shape_words(self) -> str:
        """See DrafterFile."""
        width = self.shapes["proj.0.weight"][0]
        return f"{self.heads} heads of width {width}, each reads the path before it"


def is_mlp(names: Iterable[str]) -> bool:
    """Whether a file with these tensors holds an MLP speculator."""
    return f"{PREFIX}emb.0.weight" in set(names)


def mlp_of(found: Found) -> MlpFile | None:
    """The MLP speculator in these files, None where they hold none. Raises ModelError for what is
    not known."""
    if found.header is not None or not is_mlp(found.shapes):
        return None
    names = found.named(lambda name: name.removeprefix(PREFIX))
    kept = known(found, names, KNOWN, UNREAD, "an MLP speculator")
    shapes = {name: found.shapes[inside] for name, inside in kept.items()}
    made = MlpFile(found.paths, kept, shapes, found.config, found.bytes)
    for part in ("emb", "proj", "ln", "ln bias", "head"):
        for head in range(made.heads):
            if (name := made.stored(part, head)) not in kept:
                raise ModelError(f"{found.paths[0]} lacks {name}: download it again")
    firsts = {"proj.0.weight": (None, None), "head.0.weight": (None, None)}
    refuse_shapes(found.paths[0], shapes, firsts)
    return made
