"""Engines whose backbone is the C library."""

import torch

from medusa_chat.decoding.backends import native
from medusa_chat.decoding.fused_layers import replace_submodules
from support.engines import engine_of
from support.families import tiny


def native_engine(family, library, threads=1, dtype=torch.float32, **changes):
    model = tiny(family, **changes).to(dtype)
    assert native.can_run(model)
    replace_submodules(model, packs=False)
    engine = engine_of(model, numbers=native.NUMBERS)
    assert native.enable(engine.backbone, engine.heads, native.NativeThreads(library, threads))
    return engine
