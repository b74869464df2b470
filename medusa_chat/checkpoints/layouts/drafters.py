"""The drafters that are known by their files: which one a folder, a repo or a GGUF file holds."""

from collections.abc import Iterable

from medusa_chat.checkpoints.layouts.dflash_file import dflash_of, is_dflash
from medusa_chat.checkpoints.layouts.drafter_file import DrafterFile, found_in
from medusa_chat.checkpoints.layouts.eagle_file import eagle_of, is_eagle
from medusa_chat.checkpoints.layouts.hydra_file import hydra_of, is_hydra
from medusa_chat.checkpoints.layouts.mlp_file import is_mlp, mlp_of
from medusa_chat.checkpoints.layouts.source import Source

READERS = (dflash_of, eagle_of, hydra_of, mlp_of)
RECOGNISED = (is_dflash, is_eagle, is_hydra, is_mlp)
UNNAMED_DRAFTER = "holds a drafter, not a model: give it as --draft"


def drafter_in(source: Source) -> DrafterFile | None:
    """The drafter in a source, None where it holds none. Raises ModelError for one that is not
    known."""
    found = found_in(source, is_drafter)
    if found is None:
        return None
    return next((made for read in READERS if (made := read(found)) is not None), None)


def is_drafter(names: Iterable[str]) -> bool:
    """Whether a file with these tensors holds a drafter."""
    own = list(names)
    return any(recognise(own) for recognise in RECOGNISED)
