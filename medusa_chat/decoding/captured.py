"""CapturedStep: a whole step as fixed work on the device, which CUDA records once and replays."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Case, exact
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.drafters import Draft, TreeTensors
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree

BUCKETS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
WARM_UPS = 3


@dataclass(frozen=True)
class State:
    """What goes from step to step without the host: cur [1], tokens in the cache; root [1];
    candidates [K * width], the heads' predictions. int64, on the device."""

    cur: Tensor
    root: Tensor
    candidates: Tensor


@dataclass(frozen=True)
class Taken:
    """What the host reads of a step: tokens after the root, the backbone's next one last."""

    tokens: list[int]
    path: list[int]
    is_finite: bool


class CapturedStep:
    """Steps of one tree behind at most `bucket` - nodes tokens, with exact acceptance.

    Nothing in `body` asks the device for a number, and every shape is fixed: on CUDA it is one
    graph, elsewhere it is called. Keys and values are read up to `bucket`, what does not count is
    masked, so a step costs what its bucket costs.
    """

    def __init__(
        self,
        backbone: Backbone,
        heads: MedusaHeads | None,
        tree: Tree,
        bucket: int,
        settings: GenerationSettings,
        state: State,
    ) -> None:
        self.tree, self.bucket, self.state = tree, bucket, state
        self._backbone, self._heads, self._settings = backbone, heads, settings
        device = backbone.device
        self._tensors = TreeTensors.of(tree, device)
        places = zip(tree.depths, tree.ranks, strict=True)
        index = [0 if d == 0 else 1 + (d - 1) * tree.width + rank for d, rank in places]
        self._index = torch.tensor(index, device=device)
        self._nodes = torch.arange(len(tree), device=device)
        self._deep = torch.arange(tree.depth + 1, device=device)
        self._columns = torch.arange(bucket, device=device)
        self._places = torch.zeros(len(tree), dtype=torch.long, device=device)
        self._layers = backbone.cache.fixed(self._places, bucket)
        self.out = torch.zeros(3 + tree.depth + 1 + len(tree), dtype=torch.long, device=device)
        self._replay = self._captured() if device.type == "cuda" else self.body

    def __call__(self) -> Tensor:
        """Put one step into the device's queue; `out` holds its result once the device is there."""
        self._replay()
        return self.out

    @torch.inference_mode()
    def body(self) -> None:
        """Draft, decoder, acceptance, rows moved into place, heads at the one accepted node."""
        backbone, state = self._backbone, self.state
        tokens = torch.cat((state.root, state.candidates)).index_select(0, self._index)
        self._places.copy_(state.cur + self._nodes)
        positions = state.cur + self._tensors.depths
        masks = {window: self._mask(positions, window) for window in backbone.windows}
        hidden = backbone.run_fixed(tokens, positions, masks, self._layers)
        draft = Draft(tokens, self.tree, self._tensors)
        logits = backbone.lm_head(hidden)
        taken = exact(Case(draft, logits, state.cur, self._settings, False))
        backbone.cache.move(state.cur + taken.path, state.cur + self._deep)
        whole = (
            taken.length.view(1),
            taken.next_token,
            taken.is_finite.view(1),
            taken.path,
            tokens,
        )
        self.out.copy_(torch.cat([part.long() for part in whole]))
        state.cur.add_(taken.length)
        state.root.copy_(taken.next_token)
        if self.tree.depth:
            self.draft_from(hidden.index_select(0, taken.node))

    @torch.inference_mode()
    def draft_from(self, hidden: Tensor) -> None:
        """Let the heads predict what follows the state hidden [1, d]."""
        assert self._heads is not None
        head, tree = self._backbone.lm_head, self.tree
        logits, names = self._heads.draft_logits(hidden, head, tree.depth, tree.width)
        tokens = logits.topk(tree.width).indices.flatten()
        self.state.candidates.copy_(tokens if names is None else names.index_select(0, tokens))

    def _mask(self, positions: Tensor, window: int | None) -> Tensor:
        """Additive [nodes, bucket]: the text before the tree, the ancestors, nothing else."""
        beyond = self._columns - self.state.cur  # 0 at the root's own row
        node = beyond.clamp(0, len(self.tree) - 1)
        seen = self._tensors.ancestors.index_select(1, node)
        seen = (seen & (beyond >= 0) & (beyond < len(self.tree))) | (beyond < 0)
        if window is not None:
            depth = self._tensors.depths.index_select(0, node)
            places = torch.where(beyond < 0, self._columns, self.state.cur + depth)
            seen = seen & (positions.unsqueeze(1) - places < window)
        mask = torch.zeros(seen.shape, dtype=self._backbone.dtype, device=seen.device)
        return mask.masked_fill_(~seen, -torch.inf)

    def _captured(self) -> Callable[[], None]:
        """The body as a CUDA graph. Warm-up steps run on copies of what they change."""
        kept = [t.clone() for t in (self.state.cur, self.state.root, self.state.candidates)]

        def put_back() -> None:
            for own, copy in zip(
                (self.state.cur, self.state.root, self.state.candidates), kept, strict=True
            ):
                own.copy_(copy)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.body()
                put_back()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.body()
        put_back()  # capturing ran nothing; a state that a failed capture touched is put back too
        return graph.replay


class Captured:
    """Answers by captured steps: step t + 1 is in the queue before step t is read."""

    def __init__(
        self,
        backbone: Backbone,
        heads: MedusaHeads | None,
        tree: Tree,
        settings: GenerationSettings,
    ) -> None:
        """settings: resolved, of exact acceptance. A new object where they change."""
        device = backbone.device
        self._backbone, self._heads, self._settings = backbone, heads, settings
        self.tree = tree
        self.state = State(
            torch.zeros(1, dtype=torch.long, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
            torch.zeros(tree.depth * tree.width, dtype=torch.long, device=device),
        )
        self.steps: dict[int, CapturedStep] = {}
        count = 3 + tree.depth + 1 + len(tree)
        is_cuda = device.type == "cuda"
        self._slots = [torch.zeros(count, dtype=torch.long, pin_memory=is_cuda) for _ in range(2)]
        self._events: list[Any] = [torch.cuda.Event() if is_cuda else None for _ in range(2)]

    def run(self, root: Tensor, hidden: Tensor) -> Iterator[Taken]:
        """Step after step behind what the cache holds, until it is closed or the context is full.

        root int64 [1]: certain and not yet in the cache; hidden [1, d]: the state that gave it.
        Closed at any time, the cache holds what was yielded, its last token (the next root) left
        out.
        """
        cache, state = self._backbone.cache, self.state
        state.cur.fill_(cache.length)
        state.root.copy_(root)
        if self.tree.depth:
            self._step(cache.length).draft_from(hidden)
        length, number = cache.length, 0
        longest = self.tree.depth + 1
        self._launch(0, length)
        while True:
            # the next one may stand behind a whole path more than the host knows of
            is_room = length + longest + longest < self._backbone.context
            if is_room:
                self._launch(number + 1, length + longest)
            taken = self._read(number)
            if taken.is_finite:
                length += len(taken.path)
                cache.length = length
            yield taken
            if not taken.is_finite or not is_room:
                return
            number += 1

    def _launch(self, number: int, length: int) -> None:
        out, which = self._step(length)(), number % 2
        self._slots[which].copy_(out, non_blocking=True)
        if self._events[which] is not None:
            self._events[which].record()

    def _read(self, number: int) -> Taken:
        """The one wait of a step."""
        which = number % 2
        if self._events[which] is not None:
            self._events[which].synchronize()
        values = self._slots[which].tolist()
        length, next_token, is_finite = values[:3]
        path = values[3 : 3 + length]
        nodes = values[3 + self.tree.depth + 1 :]
        return Taken([*(nodes[i] for i in path[1:]), next_token], path, bool(is_finite))

    def _step(self, length: int) -> CapturedStep:
        """The step of the bucket that holds the tree behind `length` tokens."""
        bucket = self.bucket(length)
        if bucket not in self.steps:
            self.steps[bucket] = CapturedStep(
                self._backbone, self._heads, self.tree, bucket, self._settings, self.state
            )
        return self.steps[bucket]

    def bucket(self, length: int) -> int:
        """The smallest that has room for the tree, at most what the cache has."""
        capacity = self._backbone.cache.capacity
        needed = length + len(self.tree)
        return min(next((b for b in BUCKETS if b >= needed), capacity), capacity)
