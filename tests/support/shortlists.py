"""Heads that draft from a shortlist."""

from support.engines import engine_of
from support.families import VOCABULARY, tiny
from support.native_engines import lay_out, made_native

LISTED = tuple(range(1, VOCABULARY, 3))


def shortened(family, library=None):
    model = tiny(family)
    if library is not None:
        lay_out(model, library)
    engine = engine_of(model)
    assert engine.heads.shorten(LISTED, engine.backbone.lm_head)
    if library is not None:
        return made_native(engine, library)
    return engine
