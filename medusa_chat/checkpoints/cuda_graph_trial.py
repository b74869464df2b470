"""CUDA graph trial: a backbone's steps as CUDA graphs beside the operators', at every load.

Graphs stay where the results agree. They are not timed: a graph launches the same kernels."""

from collections.abc import Iterator

import torch

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.cuda_graph_step import ASKED, CudaGraphStep
from medusa_chat.decoding.backends.parity import agrees
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import DraftRecord, Step
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import StepBackend, TorchStep
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.trees.shapes import cartesian

TEXT, NEW = 9, 16  # tokens of the made-up prompt, and of the answers to it
STARTS = (3, 5, 8)  # of several prompts: in one a near tie may make the texts differ at once
EXACT, ROUGH = 1e-3, 0.3  # of probabilities and nats, in fp32 and in 16 bits
INSTEAD = "steps run by torch operators"


def try_cuda_graphs(backbone: Backbone, heads: MedusaHeads | None) -> tuple[StepBackend, str]:
    """What runs this backbone's steps: CUDA graphs, if they agree with torch's operators; why not,
    if they do not. The cache is empty afterwards."""
    by_operators = TorchStep(backbone)
    if backbone.context < TEXT + 2 * NEW:
        return by_operators, "the context is too short to try CUDA graphs"
    recorded = CudaGraphStep(backbone)
    limit = EXACT if backbone.dtype == torch.float32 else ROUGH
    trees = (ROOT, cartesian(2, 2)) if heads is not None and len(heads) > 1 else (ROOT,)

    def difference() -> float:
        return max(_off_by(by_operators, recorded, heads, tree) for tree in trees)

    is_right = agrees(INSTEAD, difference, limit)
    Engine(by_operators).forget()
    if is_right:
        return CudaGraphStep(backbone), ""  # a new one, which frees the graphs of the trial
    return by_operators, "CUDA graphs failed or gave other results (see the log)"


def _off_by(
    by_operators: StepBackend, recorded: CudaGraphStep, heads: MedusaHeads | None, tree: Tree
) -> float:
    """The largest difference of a probability or an entropy, up to where a near tie makes the texts
    differ. Raises RuntimeError where no step after a recorded one could be compared."""
    worst, compared = 0.0, 0
    for start in STARTS:
        before = recorded.seconds
        ways = (_steps(Engine(way, heads), tree, start) for way in (by_operators, recorded))
        for number, (ours, theirs) in enumerate(zip(*ways, strict=False)):
            if ours.tokens != theirs.tokens:
                break
            worst = max(worst, *map(abs, _differences(ours, theirs)))
            compared += number >= ASKED and recorded.seconds > before
        if compared:
            return worst
    raise RuntimeError("no replayed step began like the same step by torch operators")


def _differences(ours: DraftRecord, theirs: DraftRecord) -> Iterator[float]:
    for name in ("probabilities", "entropies"):
        for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            if a is not None:
                yield a - b if a == a and b == b else torch.inf  # no number is like another


def _steps(engine: Engine, tree: Tree, start: int) -> list[DraftRecord]:
    """The drafts of the steps of a greedy answer to an artificial prompt, in order."""
    drafter = "medusa" if len(tree) > 1 else "none"
    settings = GenerationSettings(drafter=drafter, max_new_tokens=NEW, seed=0)
    prompt = [(7 * i + start) % engine.backbone.vocabulary for i in range(TEXT)]
    engine.forget()
    events = engine.generate(prompt, engine.drafter(settings, tree), settings)
    return [event.draft for event in events if isinstance(event, Step) and event.draft]
