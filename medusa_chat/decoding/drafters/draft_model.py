"""DraftModel: a smaller model with the backbone's tokenizer, which drafts a chain and its siblings.

Speculative decoding (arXiv 2211.17192) by a tree: the draft model reads its own most probable token
after each one, and the other tokens that it found probable there become siblings, which cost no
pass. Acceptance is the backbone's, so that no text depends on this model.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.draft import Draft, TreeTensors
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.probe import common_prefix
from medusa_chat.decoding.step import TorchStep
from medusa_chat.decoding.tree import ROOT, Tree

WIDTH = 4  # tokens after each one of the chain
DEEPEST = 15  # of the chain: with the root, the 16 rows of one tile
FEW = 32  # tokens of the text that wait for the next draft: longer chunks are read at once
ROW = 0.25  # of a pass: what a row costs in a pass of many
SURE, MEMORY = 0.7, 1 / 32  # of the chain's next token: at first, and the weight of one token


class DraftModel:
    """A Drafter with a backbone and a KV cache of its own, which hold a prefix of the text and,
    after a draft, the drafted chain: what is accepted of it is not read again."""

    kind, reads_states = kinds.DRAFT, False
    taps: Sequence[int] = ()

    def __init__(self, backend: TorchStep, vocabulary: int) -> None:
        """backend: runs the draft model. vocabulary: tokens of the model that it drafts for."""
        self._backend, self._backbone = backend, backend.backbone
        self._tokens = min(vocabulary, self._backbone.vocabulary)
        self._ids: list[int] = []  # the text
        self._drafted: list[int] = []  # tokens behind it that are in the cache, too
        self._sure = SURE  # how probable the chain's next token was lately
        self._root = TreeTensors.of(ROOT, self._backbone.device)

    @property
    def length(self) -> int:
        """See Drafter."""
        return len(self._ids)

    def crop(self, length: int) -> None:
        """See Drafter."""
        del self._ids[length:]
        self._drafted, cache = [], self._backbone.cache
        cache.crop(min(cache.length, len(self._ids)))

    def observe(self, features: Features) -> None:
        """See Drafter. A few tokens are read by the next draft, if there is one."""
        known, cache = len(self._ids), self._backbone.cache
        kept = common_prefix(self._drafted, features.tokens)
        self._ids += features.tokens
        self._drafted = []
        cache.crop(min(cache.length, known + kept))
        if len(features.tokens) > FEW:
            self._read(len(self._ids))

    @torch.inference_mode()
    def draft(self, root: int, depth: int, allowance: Allowance) -> Candidates:
        """See Drafter. A pass is made as long as it may find a node that is worth it."""
        room = self._backbone.context - len(self._ids) - 1
        if room < 1:
            return Candidates(ROOT, [root], [torch.nan], 0.0)
        self.crop(len(self._ids))  # of a draft that was not followed by text
        pending = len(self._ids) - self._backbone.cache.length
        self._read(len(self._ids) - FEW)
        behind = self._ids[self._backbone.cache.length :]
        tokens, shares, passes = [root], [torch.nan], 1 + ROW * pending
        found: list[float] = []  # probabilities of the nodes
        reached, at = 1.0, 0
        for level in range(min(depth, room, DEEPEST)):
            passes += level > 0
            read = [*behind, tokens[at]] if level == 0 else [tokens[at]]
            best, probable = self._after(read)
            self._drafted.append(tokens[at])
            at = len(tokens)
            tokens += best
            shares += probable
            found += [reached * share for share in probable]
            self._sure += MEMORY * (probable[0] - self._sure)
            reached *= probable[0]
            is_enough = sum(share >= reached for share in found) >= allowance.nodes - 1
            if is_enough or not allowance.pays(reached * self._sure, level + 2):
                break
        return Candidates(_chain_with_siblings(len(self._drafted)), tokens, shares, passes)

    def _after(self, tokens: Sequence[int]) -> tuple[list[int], list[float]]:
        """Read tokens -> the most probable ones after them, and their probabilities."""
        backbone = self._backbone
        if len(tokens) == 1:
            draft = Draft(self._ids_of(tokens), self._root)
            logits = self._backend.run(draft)[1]
            backbone.cache.extend(1)
        else:
            logits = backbone.lm_head(backbone.run_chunk(self._ids_of(tokens))[-1:])
        row = logits[0, : self._tokens].float()
        values, best = row.topk(min(WIDTH, self._tokens))
        probable = (values - row.logsumexp(0)).exp().nan_to_num(0.0)
        # in one copy: float32 has all integers below 2 ** 24
        ids, shares = torch.stack((best.float(), probable)).tolist()
        return [int(token) for token in ids], shares

    @torch.inference_mode()
    def _read(self, length: int) -> None:
        """Read the text up to so many tokens into the cache, as far as it has room."""
        cache, chunk = self._backbone.cache, self._backbone.chunk
        while cache.length < min(length, self._backbone.context):
            end = min(cache.length + chunk, length, self._backbone.context)
            self._backbone.run_chunk(self._ids_of(self._ids[cache.length : end]))

    def _ids_of(self, tokens: Sequence[int]) -> torch.Tensor:
        """Ids that this model has: int64 on its device. Others are padding of the backbone's."""
        most = self._backbone.vocabulary
        ids = [token if token < most else 0 for token in tokens]
        return torch.tensor(ids, device=self._backbone.device)


@lru_cache
def _chain_with_siblings(depth: int, width: int = WIDTH) -> Tree:
    """A chain of first children, each with `width` - 1 siblings."""
    parents, ranks = [-1], [-1]
    for level in range(depth):
        parents += [(level - 1) * width + 1 if level else 0] * width
        ranks += range(width)
    return Tree(tuple(parents), tuple(ranks))
