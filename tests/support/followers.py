"""Engines with a drafter that follows their text, and whole answers of theirs."""

import json

import torch
from safetensors.torch import save_file

from medusa_chat.checkpoints.layouts.drafter_file import Sizes
from medusa_chat.checkpoints.layouts.drafters import drafter_in
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from support.engines import decode, engine_of
from support.families import VOCABULARY

CPU, HIDDEN = torch.device("cpu"), 32


def write(folder, tensors: dict, settings: dict, file: str = "model.safetensors"):
    """A folder with a drafter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if file.endswith((".bin", ".pt")):
        torch.save(tensors, folder / file)
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file)
    return folder


def followed(model, folder, read, drafter, dtype=torch.float32):
    """An engine of the model with the drafter of a folder, which `read` reads and `drafter` is made
    of."""
    engine = engine_of(model, heads=0)
    engine.heads, backbone = None, engine.backbone
    sizes = Sizes(HIDDEN, model.config.num_hidden_layers, VOCABULARY)
    lent = Lent(model.get_input_embeddings(), backbone.lm_head, model.config)
    made = read(drafter_in(LocalFolder(folder)), lent, sizes, CPU, dtype)
    engine.follow(drafter(made, backbone.context, VOCABULARY))
    return engine


def answer(engine, name, nodes=16, **settings):
    """All events of an answer by the drafter of this name, without a budget."""
    kind = engine.follower.kind
    drafter = engine.drafter(GenerationSettings(name, nodes=nodes), ROOT, None, kind)
    return decode(engine, drafter=drafter, nodes=nodes, **settings)


def texts(engine, name="none", **settings):
    """The ids of such an answer."""
    return answer(engine, name, **settings)[-1].token_ids


def require_plain_text(engine):
    """The engine's drafter, alone and with the text, gives plain decoding's tokens."""
    for temperature in (0.0, 0.9):
        plain = texts(engine, temperature=temperature)
        for name in (engine.follower.kind.name, "auto"):
            assert texts(engine, name, temperature=temperature) == plain, (name, temperature)
