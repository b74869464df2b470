"""Heads that draft from a shortlist."""

from medusa_chat.decoding.backends.replacements import replace_submodules
from support.engines import engine_of
from support.families import VOCABULARY, tiny
from support.native_engines import made_native

LISTED = tuple(range(1, VOCABULARY, 3))


def shortened(family, library=None):
    model = tiny(family)
    if library is not None:
        replace_submodules(model, packs=False)
    engine = engine_of(model)
    assert engine.heads.shorten(LISTED, engine.backbone.lm_head)
    if library is not None:
        return made_native(engine, library)
    return engine
