"""Engines whose backbone is the C library."""

import torch

from medusa_chat.decoding.backends import native_step
from medusa_chat.decoding.backends.native_layers import layer_packer
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import UNCHANGED
from medusa_chat.decoding.backends.replacements import replace_submodules
from support.engines import engine_of, on
from support.families import CONTEXT, tiny


def native_engine(family, library, threads=1, dtype=torch.float32, context=CONTEXT, **changes):
    model = tiny(family, max_position_embeddings=context, **changes).to(dtype)
    assert native_step.can_run(model)
    lay_out(model, library)
    return made_native(engine_of(model, context=context), library, threads)


def lay_out(model, library, keep=UNCHANGED):
    """Merge the layers of a model and lay them out for C, as a load does."""
    made = layer_packer(model, NativeLibrary(library, 1), keep)
    assert made is not None
    replace_submodules(model, packs=False, pack_layer=made)


def made_native(engine, library, threads=1):
    """The engine with its pass in C."""
    shared = NativeLibrary(library, threads)
    backend = native_step.attach(engine.backbone, engine.heads, shared)
    assert backend is not None
    return on(engine, backend)
