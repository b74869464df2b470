"""Engines of tiny models, whole answers of theirs, and a drafter that knows the answer."""

from functools import lru_cache

import torch

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.draft import Draft, Plan, TreeTensors
from medusa_chat.decoding.drafters.draft_model import DraftModel
from medusa_chat.decoding.drafters.kinds import kinds_of
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.families import needs_eager
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import TorchStep
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.trees.presets import load_tree
from medusa_chat.trees.shapes import cartesian, chain
from support.families import CONTEXT, VOCABULARY, tiny

NEW = 16
TREES = {
    "chain": chain(4),
    "dense": cartesian(3, 2, 1, 1),
    "walkthrough": cartesian(2, 3),
    "wide": cartesian(10),
    "mc_sim_7b_63": load_tree("mc_sim_7b_63"),
    "zephyr-24": load_tree("zephyr_stage2", 24),
}
PROMPT = [5, 9, 13, 5, 9, 17, 30, 5, 9]


class Oracle:
    """A drafter that knows the answer: hides it among wrong siblings, now and then errs."""

    drafter = None

    def __init__(self, answer: list[int], tree: Tree, period: int = 4) -> None:
        self.answer, self.tree, self.period = answer, tree, period
        self.seen = -len(PROMPT)

    def plan(self, tokens, depth):
        self.seen += len(tokens)
        tree = self.tree if depth >= self.tree.depth else self.tree.pruned(depth)
        ids = [tokens[-1]]
        for node in range(1, len(tree)):
            place = self.seen + tree.depths[node] - 1
            right = self.answer[place] if place < len(self.answer) else 3
            is_right = tree.ranks[node] == place % 2 and place % self.period
            ids.append(right if is_right else (right + 1 + tree.ranks[node]) % VOCABULARY)
        self.ids = ids
        return Plan(TreeTensors.of(tree, torch.device("cpu")))

    def fill(self, plan, root, hidden, details):
        assert int(root) == self.ids[0]
        return Draft(torch.tensor(self.ids), plan.tensors)

    def learn(self, nodes, path): ...


def engine_of(model, implementation="medusa_tree", context=CONTEXT, heads=4, eos=()) -> Engine:
    random = MedusaHeads(heads, model.config.hidden_size, dtype=model.dtype).requires_grad_(False)
    torch.manual_seed(1)
    torch.nn.init.normal_(random.weight, std=0.3)
    backbone = Backbone(model, context)
    if not needs_eager(model):
        backbone.attend_by(implementation)
    return Engine(TorchStep(backbone), random, frozenset(eos))


def on(engine: Engine, backend) -> Engine:
    """The engine of the same parts whose steps this backend runs."""
    return Engine(backend, engine.heads, engine.eos)


def decode(engine, prompt=PROMPT, drafter=None, tree=ROOT, details=True, **settings):
    """All events of one answer."""
    chosen = GenerationSettings(
        **{"drafter": "none", "seed": 11, "max_new_tokens": NEW, "nodes": 16} | settings
    )
    drafter = drafter or engine.drafter(chosen, tree)
    return list(engine.generate(prompt, drafter, chosen, details))


def tokens(engine, *arguments, **keywords):
    return list(decode(engine, *arguments, **keywords)[-1].token_ids)


def draft_model(model, context=CONTEXT) -> DraftModel:
    """A draft model for tiny models."""
    return DraftModel(TorchStep(Backbone(model, context)), VOCABULARY)


@lru_cache
def random_draft() -> DraftModel:
    return draft_model(tiny("llama", seed=5))


def drafters_of(engine: Engine, plain: list[int], tree: Tree, temperature: float):
    """One drafter of each kind for `tree`, alone and with the text, and one that is nearly always
    right."""
    if engine.follower is None:
        engine.follower = random_draft()
        engine.follower.crop(0)
    for kind in kinds_of(1, "random"):
        for name in (kind.name, *(["auto"] if kind.source else [])):
            given = {"nodes": len(tree), "temperature": temperature, "seed": 1}
            yield engine.drafter(GenerationSettings(drafter=name, **given), tree, None, kind)
    yield Oracle(plain, tree)
