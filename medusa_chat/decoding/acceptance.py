"""Acceptance: which nodes of a draft the backbone agrees to, and its own token after them.

Samples: what top-k, top-p and min-p leave of scores, and noise that is a function of the place.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from medusa_chat.decoding.draft import Draft
from medusa_chat.decoding.settings import GenerationSettings

MASK32 = 0xFFFFFFFF
IMPOSSIBLE = -1000.0  # a log-probability whose probability is 0 in any precision, and not infinite
Position = int | Tensor  # of the root in the text; a tensor [1] where only the device knows it


class Rows:
    """What a rule reads from rows of scores [n, V] of a floating dtype, by torch's operators.
    A backend may have it faster (NativeRows in backends/native_rows.py); there is no rule in it."""

    def largest(self, scores: Tensor) -> Tensor:
        """scores [n, V] -> the place of each row's largest, int64 [n]; the lowest of equals."""
        return scores.argmax(-1)

    def draw(
        self, scores: Tensor, depths: Tensor, deepest: int, place: Position, seed: int | Tensor
    ) -> Tensor:
        """`largest` of scores [n, V] with the noise (`gumbel`) of each row's depth added: int64
        [n]. depths int64 [n], at most `deepest`; place: of depth 0 in the text."""
        places = place + torch.arange(deepest + 1, device=scores.device)
        noise = gumbel(seed, places, scores.shape[-1])
        return (scores + noise.index_select(0, depths)).argmax(-1)

    def sample(self, given: "VerifyInput") -> Tensor:
        """`draw` of what top-k, top-p and min-p leave of the scores: int64 [n]."""
        return self.draw(filtered(given.scores, given.settings), *given.noise)

    def sums(self, given: "VerifyInput") -> tuple[Tensor, Tensor]:
        """log(sum(exp)) of each row of the scores, and the entropy in nats of its softmax: float32
        [n] each."""
        log_sums = given.scores.logsumexp(-1)
        return log_sums, entropies(given.scores - log_sums.unsqueeze(-1))

    def drafted(self, given: "VerifyInput") -> Tensor:
        """The score of each node's token at its parent, float32 [n]."""
        return given.scores[given.draft.tensors.parents, given.draft.tokens]

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` largest of each row in turn, their places int64, [n, count] each, and
        log(sum(exp)) [n]: float32."""
        values, places = logits.float().topk(count)
        return values, places, logits.float().logsumexp(-1)


TORCH = Rows()


@dataclass(frozen=True)
class VerifyInput:
    """The input of an acceptance rule. logits: the backbone's [n, V], a row for each node;
    position: the root's in the text; details: whether Acceptance has them; rows: reads logits."""

    draft: Draft
    logits: Tensor
    position: Position
    settings: GenerationSettings
    details: bool
    rows: Rows = TORCH

    @cached_property
    def scores(self) -> Tensor:
        """The logits by the temperature, float32 [n, V]."""
        return scaled(self.logits, self.settings)

    @property
    def noise(self) -> tuple[Tensor, int, Position, int | Tensor]:
        """What the noise of each node depends on: depths, the deepest, the place of depth 0 in the
        text, and the seed."""
        draft, seed = self.draft, self.settings.seed
        assert seed is not None, "a sampling run needs its seed resolved"
        return draft.tensors.depths, draft.tree.depth, self.position + 1, seed


@dataclass(frozen=True)
class Acceptance:
    """node int64 [1]: the last accepted one; sampled int64 [n]: the backbone's own token after each
    node; checks [n]: not finite at a node where its logits are broken, with details the entropies.
    Of the details float32 [n] (see DraftRecord) log_probabilities: at a node's parent, of the root
    none; thresholds: None unless typical. All on the device."""

    node: Tensor
    sampled: Tensor
    checks: Tensor
    log_probabilities: Tensor | None = None
    thresholds: Tensor | None = None


Rule = Callable[[VerifyInput], Acceptance]


def exact(given: VerifyInput) -> Acceptance:
    """Take the backbone's own sample at each node and follow the child that equals it.

    Every token is the backbone's own, so this is lossless at any temperature for any deterministic
    tree; greedy is its limit.
    """
    draft, sampled = given.draft, own_tokens(given)
    at_parent = None
    if given.details:
        at_parent, checks = figures(given)
    else:
        checks = given.logits.gather(1, sampled.unsqueeze(1)).view(-1)
    node = draft.tensors.parents  # of plain decoding: there is nothing to accept but the root
    if node.shape[0] > 1:
        lengths = _lengths(draft.tokens == sampled.index_select(0, node), draft)
        node = lengths.argmax(0, keepdim=True)  # the lowest node of equals
    return Acceptance(node, sampled, checks, at_parent)


def typical(given: VerifyInput, is_sampled: bool = False) -> Acceptance:
    """Accept a node while p > min(epsilon, delta * exp(-H)) at its parent (Medusa, section 2.3.1).

    The first token and every next token are greedy, so the result is deterministic and
    temperature only relaxes acceptance. Lossy. At temperature 0 it is greedy decoding.
    """
    draft = given.draft
    if given.settings.is_greedy:
        return exact(given)
    at_parent, entropy = figures(given)
    threshold = thresholds(entropy, given.settings)
    accepted = at_parent.exp() > threshold.index_select(0, draft.tensors.parents)
    lengths = _lengths(accepted, draft)
    value = at_parent.expand(len(lengths), -1).masked_fill(draft.tensors.others, 0).sum(1)
    node = torch.where(lengths == lengths.max(), value, -torch.inf).argmax(0, keepdim=True)
    if is_sampled:
        log_p = torch.log_softmax(given.scores, -1)
        left = log_p.masked_fill(log_p.exp() <= threshold.unsqueeze(1), -torch.inf)
        chosen = given.rows.draw(left, *given.noise)
    else:
        chosen = given.rows.largest(given.logits)
    return Acceptance(node, chosen, entropy, *(at_parent, threshold) if given.details else ())


def typical_sampled(given: VerifyInput) -> Acceptance:
    """As typical, but the first token and every next token are sampled from the tokens that pass
    the rule, renormalised. Lossy. At temperature 0 it is greedy decoding."""
    return typical(given, is_sampled=True)


ACCEPTANCE: dict[str, Rule] = {
    "exact": exact,
    "typical": typical,
    "typical-sampled": typical_sampled,
}


def own_tokens(given: VerifyInput) -> Tensor:
    """The backbone's own token after each node, int64 [n]: greedy at temperature 0 (the lowest
    index wins a tie), else a sample by Gumbel-max."""
    if given.settings.is_greedy:
        return given.rows.largest(given.logits)
    return given.rows.sample(given)


def figures(given: VerifyInput) -> tuple[Tensor, Tensor]:
    """float32 [n] each: a node's log-probability after its parent (any number for the root), and
    the entropy in nats of the distribution after the node."""
    parents = given.draft.tensors.parents
    sums, entropy = given.rows.sums(given)
    if parents.shape[0] == 1:
        return sums, entropy
    return given.rows.drafted(given) - sums.index_select(0, parents), entropy


def thresholds(entropy: Tensor, settings: GenerationSettings) -> Tensor:
    """min(epsilon, delta * exp(-H)) of entropies float32 [n] in nats -> [n]: posterior_threshold is
    epsilon, posterior_alpha delta."""
    return (settings.posterior_alpha * torch.exp(-entropy)).clamp(max=settings.posterior_threshold)


def _lengths(accepted: Tensor, draft: Draft) -> Tensor:
    """bool [n] -> the number of nodes after the root on the path to each, int64 [n]; -1 where one
    of them was refused."""
    tensors = draft.tensors
    return torch.where((accepted | tensors.others).all(1), tensors.depths, -1)


def entropies(log_p: Tensor) -> Tensor:
    """Entropy in nats of rows of log-probabilities [n, V] -> [n] in their dtype; impossible tokens
    add nothing."""
    return -(log_p.exp() * log_p.clamp(min=IMPOSSIBLE)).sum(-1)


def gumbel(seed: int | Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise float32 [p, V], a function of (seed, position, token) alone.

    All nodes of one depth share it, and a later pass over the same position draws it again: so
    `exact` gives token for token what plain sampling with the same seed gives, whatever the tree.
    This is the reference of two faster writings, kernels/draw.c and kernels/fused.py.
    """
    low, high = seed & MASK32, seed >> 32
    start = _mix(torch.zeros_like(positions) + low + 0x9E3779B9)
    key = _mix(start ^ (_mix(positions * 0x85EBCA77 + 1) + _mix(start + high)) & MASK32)
    tokens = torch.arange(vocabulary, device=positions.device) * 0x9E3779B1 & MASK32
    bits = _mix(_mix((tokens + key.unsqueeze(1)) & MASK32) ^ _mix(key + 0x27D4EB2F).unsqueeze(1))
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """A 32-bit mixing function (MurmurHash3's finaliser) on int64 tensors."""
    x = x & MASK32
    x = (x ^ x >> 16) * 0x85EBCA6B & MASK32
    x = (x ^ x >> 13) * 0xC2B2AE35 & MASK32
    return x ^ x >> 16


def scaled(logits: Tensor, settings: GenerationSettings) -> Tensor:
    """logits [n, V] of any floating dtype by the temperature, float32 [n, V]."""
    logits = logits.float()
    return logits if settings.is_greedy else logits / settings.scale


LIKELY = (1024, 8192)  # of how many tokens a CPU tries whether they are enough for top-p


def filtered(scores: Tensor, settings: GenerationSettings) -> Tensor:
    """Top-k, then top-p, then min-p: scores float32 [n, V] with what is left out at -inf."""
    if 0 < settings.top_k < scores.shape[-1]:
        lowest = scores.topk(settings.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if settings.top_p < 1:
        scores = scores.masked_fill(_beyond(scores, settings.top_p), -torch.inf)
    if settings.min_p > 0:  # Nguyen et al., arXiv 2407.01082: p >= min_p * max(p)
        least = scores.amax(-1, keepdim=True) + math.log(settings.min_p)
        scores = scores.masked_fill(scores < least, -torch.inf)
    return scores


def _beyond(scores: Tensor, top_p: float) -> Tensor:
    """Which tokens of scores [n, V] come, from the most likely one on and the lowest index first
    among equals, when the share top_p is reached: bool [n, V]. A row's are the same whatever rows
    stand beside it.

    On a CPU a sort of 49,152 scores takes ten times what finding the first 1,024 of them does, and
    those are nearly always enough; the shares, of the whole row, are the same either way.
    """
    shares, every = torch.softmax(scores, -1), scores.shape[-1]
    for count in (*(LIKELY if scores.is_cpu else ()), every):
        best, order = _most_likely(scores, count)
        until = shares.gather(1, order).cumsum(-1)
        # of equals at the end there may be more than are looked at
        if count >= every or bool(((until >= top_p) & (best > best[:, -1:])).any(-1).all()):
            break
    beyond = torch.zeros_like(until, dtype=torch.bool)
    beyond[:, 1:] = until[:, :-1] >= top_p
    return torch.ones_like(scores, dtype=torch.bool).scatter(1, order, beyond)


def _most_likely(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(scores, tokens) of the `count` largest of each row, in turn."""
    if count >= scores.shape[-1]:
        return torch.sort(scores, dim=-1, descending=True, stable=True)
    among = scores.topk(count).indices.sort(-1).values
    best, at = torch.sort(scores.gather(1, among), dim=-1, descending=True, stable=True)
    return best, among.gather(1, at)
