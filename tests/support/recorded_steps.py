"""Recorded steps of tiny models on fake tensors."""

from functools import partial
from types import SimpleNamespace

import torch

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.cuda_graph_step import DeviceSettings, RecordedStep, State
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.families import needs_eager
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import DecodeState, TorchStep
from medusa_chat.decoding.tree import ROOT
from medusa_chat.trees.shapes import cartesian
from support.fake_device import DEVICE
from support.families import tiny

TREES = {"plain": ROOT, "tree": cartesian(3, 2)}
SAMPLED = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.7},
    "cut": SAMPLED,
    "min-p": {"temperature": 0.7, "min_p": 0.1},
    "typical": {"acceptance": "typical", "temperature": 0.7},
    "typical, cut": {"acceptance": "typical", **SAMPLED},
}


def of_dtype(dtype, make):
    """What `make` makes with parameters of this dtype; fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def step_of(
    family,
    tree,
    details=False,
    shortlist=(),
    num_hidden_layers=2,
    implementation="medusa_tree",
    dtype=torch.float32,
    is_wide=False,
    has_root=False,
    **asked,
) -> RecordedStep:
    """A recorded step of a tiny model, inside of fake_device. is_wide: fp32 logits in any dtype;
    has_root: the heads read the root."""
    model = of_dtype(dtype, partial(tiny, family, num_hidden_layers=num_hidden_layers))
    replace_submodules(model)
    backbone = Backbone(model, 90)
    if not needs_eager(model):
        backbone.attend_by(implementation)
    backbone.lm_head.is_wide = is_wide
    heads = MedusaHeads(4, model.config.hidden_size, dtype=dtype, has_root=has_root)
    heads.read_roots(model.get_input_embeddings())
    if shortlist:
        heads.shorten(shortlist, backbone.lm_head)
    engine = Engine(TorchStep(backbone), heads)
    drafter = "medusa" if len(tree) > 1 else "none"
    settings = GenerationSettings(drafter=drafter, seed=0, nodes=len(tree), **asked)
    made = engine.drafter(settings, tree)
    plan = made.plan([1, 2, 3], 4)
    hidden = torch.empty(1, model.config.hidden_size, dtype=dtype)
    state = DecodeState(made, settings, details, hidden, 5)
    capture = SimpleNamespace(recorded=lambda body: body)
    given = capture, backbone, State.like(hidden), plan, state
    return RecordedStep(*given, DeviceSettings(settings, DEVICE), 80)
