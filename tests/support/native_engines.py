"""Engines whose backbone is the C library."""

import torch

from medusa_chat.decoding.backends import native
from medusa_chat.decoding.backends.native.blocks import AS_IT_IS
from medusa_chat.decoding.backends.replacements import replace_submodules
from support.engines import engine_of, on
from support.families import CONTEXT, tiny


def native_engine(family, library, threads=1, dtype=torch.float32, context=CONTEXT, **changes):
    model = tiny(family, max_position_embeddings=context, **changes).to(dtype)
    assert native.can_run(model)
    lay_out(model, library)
    return made_native(engine_of(model, context=context), library, threads)


def lay_out(model, library, keep=AS_IT_IS):
    """Merge the layers of a model and lay them out for C, as a load does."""
    made = native.layout(model, native.NativeThreads(library, 1), keep)
    assert made is not None
    replace_submodules(model, packs=False, lay_out=made)


def made_native(engine, library, threads=1):
    """The engine with its pass in C."""
    shared = native.NativeThreads(library, threads)
    backend = native.native_step(engine.backbone, engine.heads, shared)
    assert backend is not None
    return on(engine, backend)
