"""Heads that draft from a shortlist."""

from medusa_chat.decoding.backends import native
from medusa_chat.decoding.fused_layers import replace_submodules
from support.engines import engine_of
from support.families import VOCABULARY, tiny

LISTED = tuple(range(1, VOCABULARY, 3))


def shortened(family, library=None):
    model = tiny(family)
    if library is not None:
        replace_submodules(model, packs=False)
    engine = engine_of(model)
    assert engine.heads.shorten(LISTED, engine.backbone.lm_head)
    if library is not None:
        assert native.enable(engine.backbone, engine.heads, native.NativeThreads(library, 1))
    return engine
