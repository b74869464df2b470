"""The kinds of drafters: their names, and the words that stand for them everywhere. No torch."""

from dataclasses import dataclass

from medusa_chat.decoding.events import Source

WITH_TEXT: dict[Source | None, Source] = {  # of a node that the text proposed, too
    "heads": "both",
    "draft": "draft and text",
    "first draft": "first draft and text",
    "second draft": "second draft and text",
    "both drafts": "both drafts and text",
}


@dataclass(frozen=True)
class Kind:
    """A kind of drafter. name: of --drafter. label: on the page. source: of a node that it proposed
    alone (events.Source), None for kinds that have no probabilities. needs: what a model must have
    for it, "heads", or its own name for what is loaded beside the model; empty for nothing.
    missing: what to say where the model does not have it. has_own_tree: whether it makes one of its
    own."""

    name: str
    label: str
    source: Source | None = None
    needs: str = ""
    missing: str = ""
    has_own_tree: bool = False


NONE = Kind("none", "plain decoding")
LOOKUP = Kind("prompt-lookup", "Prompt lookup")
MEDUSA = Kind(
    "medusa",
    "Medusa",
    "heads",
    "heads",
    "the checkpoint has no Medusa heads: use --drafter prompt-lookup",
)


def _loaded(name: str, label: str, what: str) -> Kind:
    """A kind that --draft loads beside the model."""
    missing = f"no {what} is loaded: start with --draft ID|DIR|FILE"
    return Kind(name, label, "draft", name, missing, has_own_tree=True)


DRAFT = _loaded("draft", "Draft model", "draft model")
EAGLE = _loaded("eagle", "EAGLE", "EAGLE drafter")
DFLASH = _loaded("dflash", "DFlash", "DFlash drafter")
HYDRA = _loaded("hydra", "Hydra", "Hydra drafter")
MLP = _loaded("mlp", "MLP speculator", "MLP speculator")
KINDS = (MEDUSA, DFLASH, EAGLE, HYDRA, MLP, DRAFT, LOOKUP, NONE)
BY_NAME = {kind.name: kind for kind in KINDS}
AUTO = "auto"  # the fastest that the model has, with the text's repetitions in one tree
NAMES = (AUTO, *BY_NAME)


def short_label(heads: int, beside: str) -> str:
    """What drafts first for a model as in `kinds_of`, in one word: on the switch beside "Plain"."""
    first = kinds_of(heads, beside)[0]
    return {LOOKUP: "Lookup", DRAFT: "Draft", MLP: "MLP"}.get(first, first.label)


def kinds_of(heads: int, beside: str) -> tuple[Kind, ...]:
    """The kinds that draft for a model with so many heads, beside which the kind of this name is
    loaded, if any."""
    has = {"": True, "heads": heads > 0, beside: True}
    return tuple(kind for kind in KINDS if kind is not NONE and has.get(kind.needs))
